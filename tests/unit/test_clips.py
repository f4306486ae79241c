"""Clips: features once a clip, a frozen encoder once a clip, a trained one anew with its gradient; bounded memory."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from skirl.config.schema import OptimConfig
from skirl.models.clips import ClipStore
from skirl.prompts.decode import load_clip
from skirl.rollouts.engines.policy import PolicySampler
from skirl.training.backends.single import SingleBackend
from skirl.training.objective import SupervisedObjective
from tests import tiny

CLIPS = [tiny.clip(n, 1.0 + 0.3 * n) for n in range(4)]


class CountingLoad:
    """Decodes, and counts what it decoded."""

    def __init__(self):
        self.decoded = []

    def __call__(self, media, min_samples):
        self.decoded.append(media.key)
        return load_clip(media, min_samples)


@pytest.fixture(scope="module")
def kit(checkpoints):
    return tiny.make_kit(checkpoints["native"])


def store(kit, **settings):
    load = CountingLoad()
    defaults = {"load": load, "encoder_frozen": True}
    return ClipStore(kit.loaded.model, kit.loaded.family, kit.loaded.processor, **defaults | settings), load


def one_clip_bytes(kit):
    return store(kit)[0].encode(CLIPS[:1])[0].nbytes


def test_a_frozen_encoder_runs_once_a_clip_over_sampling_and_training(checkpoints):
    kit = tiny.make_kit(checkpoints["native"])
    sampler = PolicySampler(kit.policy, kit.loaded.tokenizer)
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-3), 100)
    prompts = kit.prompts(5)
    plan = tiny.whole(tiny.sequences(kit, (3, 4, 5, 2, 6), streams=False))
    for n in range(3):
        sampler.generate(tiny.requests(prompts[:3], kit.sampling(max_new_tokens=3), group_size=4, key=str(n)))
        sampler.generate(tiny.requests(prompts[2:], kit.sampling(max_new_tokens=3), group_size=4, key=str(n)))
        backend.logprobs(plan)
        backend.update(plan, n + 1)
        backend.update(tiny.alone(plan), n + 1)
    assert kit.clips.num_encoded == 5


def test_rows_are_those_of_the_encoder_alone(kit):
    clips, load = store(kit)
    rows = clips.encode([CLIPS[2], CLIPS[0], CLIPS[2]])
    assert rows[0] is rows[2]
    for media, row in zip((CLIPS[2], CLIPS[0]), rows, strict=False):
        features = kit.loaded.family.features(kit.loaded.processor, load_clip(media, 16000))
        with torch.no_grad():
            wanted = kit.loaded.family.encode(kit.loaded.model, features)
        assert row.shape == wanted.shape
        assert (row - wanted).abs().max() < 1e-5
        assert not row.requires_grad
    assert load.decoded == [CLIPS[2].key, CLIPS[0].key]
    assert clips.num_encoded == 2


def test_features_are_made_once_a_clip_also_where_the_encoder_is_trained(kit):
    clips, load = store(kit, encoder_frozen=False)
    for _ in range(3):
        clips.encode(CLIPS)
    assert sorted(load.decoded) == sorted(m.key for m in CLIPS)
    assert clips.num_encoded == 12


def test_segments_of_one_file_are_different_clips(kit):
    clips, load = store(kit)
    part = replace(CLIPS[0], start_s=0.5)
    first, second = clips.encode([CLIPS[0], part])
    assert (first - second).abs().max() > 1e-3
    assert len(load.decoded) == 2


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(kit):
    room = 2 * one_clip_bytes(kit) + 1
    clips, load = store(kit, max_bytes=room)
    same_size = [replace(CLIPS[0], start_s=0.1 * n) for n in range(3)]
    a, b, c = same_size
    clips.encode([a])
    clips.encode([b])
    clips.encode([a])  # used again, so b is the oldest
    assert clips.num_encoded == 2
    clips.encode([c])
    assert clips.num_encoded == 3
    clips.encode([a])
    clips.encode([c])
    assert clips.num_encoded == 3
    clips.encode([b])
    assert clips.num_encoded == 4
    assert load.decoded.count(b.key) == 2  # features are bounded too


def test_memory_does_not_grow_with_the_clips(kit):
    clips, _ = store(kit, max_bytes=3 * one_clip_bytes(kit))
    rows = [weakref.ref(clips.encode([replace(CLIPS[0], start_s=0.05 * n)])[0]) for n in range(12)]
    gc.collect()
    assert [n for n, row in enumerate(rows) if row() is not None] == [9, 10, 11]


def test_a_kept_clip_does_not_keep_those_that_were_encoded_with_it(kit):
    rows = store(kit)[0].encode(CLIPS)
    assert [row.untyped_storage().nbytes() for row in rows] == [row.nbytes for row in rows]


def test_a_clip_larger_than_the_bound_still_works(kit):
    clips, _ = store(kit, max_bytes=1)
    assert [len(r) for r in clips.encode(CLIPS)] == [
        kit.loaded.family.num_tokens(kit.loaded.config, round(16000 * m.duration_s)) for m in CLIPS
    ]


def test_a_trained_encoder_gets_its_gradient_and_is_run_anew(checkpoints):
    kit = tiny.make_kit(checkpoints["native"], freeze=())
    encoder = [p for n, p in kit.policy.named_model_parameters() if "audio_tower" in n]
    assert encoder
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-2), 100)
    plan = tiny.whole(tiny.sequences(kit, (4, 3), streams=False))
    before = [p.detach().clone() for p in encoder]
    features = kit.clips.encode([plan.sequences[0].media[0]])[0].detach().clone()
    with tiny.GradientTap(kit.policy) as tap:
        losses = [backend.update(plan, n).losses[0] for n in range(1, 4)]
    assert losses[2] < losses[0]
    reached = [n for n, g in tap.sums.items() if n.startswith("encoder.") and g.abs().max() > 0]
    assert len(reached) > 0.8 * len(encoder)
    assert sum(not torch.equal(p, q) for p, q in zip(before, encoder, strict=True)) > 0.8 * len(encoder)
    assert (kit.clips.encode([plan.sequences[0].media[0]])[0] - features).abs().max() > 1e-3
    assert kit.clips.num_encoded == 2 * 3 + 2


def test_a_trained_encoders_gradient_is_that_of_transformers(checkpoints, record_property):
    kit = tiny.make_kit(checkpoints["native"], freeze=())
    made = tiny.sequences(kit, (4, 3), streams=False)
    backend = SingleBackend(kit.policy, SupervisedObjective(), OptimConfig(lr=1e-30, max_grad_norm=None), 100)
    with tiny.GradientTap(kit.policy) as tap:
        backend.update(tiny.whole(made), 1)
    roles = kit.loaded.family.roles
    got = {f"{roles[n.split('.', 1)[0]]}.{n.split('.', 1)[1]}": g for n, g in tap.sums.items()}

    plain = tiny.plain_model(checkpoints["native"])
    for sequence in made:
        (-tiny.plain_logprobs(plain, sequence).sum() / 7).backward()
    wanted = {n: p.grad for n, p in plain.model.named_parameters() if n in got}
    total = np.sqrt(sum(float(g.norm()) ** 2 for g in wanted.values()))
    difference = max(float((wanted[n] - got[n]).norm()) for n in got) / total
    record_property("trained_encoder_gradient", difference)
    assert difference < 1e-5
