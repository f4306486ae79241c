"""Tiny random checkpoints of every family (below 0.5M parameters), built on the spot, with tokenizer and processor.

For tests of recipes and rewards: each is written to a directory that ``load_model`` loads; nothing is downloaded.
Equal arguments give equal weights. Windows of the Whisper-like families are shortened, their rules are the real ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "tiny_audio_flamingo_3",
    "tiny_glm_asr",
    "tiny_qwen2_audio",
    "tiny_qwen3",
    "tiny_qwen3_asr",
    "tiny_qwen3_moe",
    "tiny_voxtral",
]

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Qwen's split of text into words, so that a reloaded tokenizer cuts as this one did.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_MERGES = 1024


def tiny_qwen3_asr(
    directory: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    texts: Sequence[str] | None = None,
    original_layout: bool = False,
    initializer_range: float = 0.02,
    seed: int = 0,
) -> Path:
    """Qwen3-ASR.

    Args:
        directory: made if missing.
        hidden: width of encoder and language model, a multiple of 4.
        layers: of each.
        texts: the tokenizer merges bytes until the words of these are single tokens (at most 1024 merges); without
            them each byte is a token, so that any language can be written.
        initializer_range: spread of the random weights; small models learn sooner from 0.04.
        original_layout: as released (thinker_config), instead of transformers' own.
        seed: of the weights.

    Returns:
        The directory.
    """
    from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration
    from transformers import Qwen3ASRProcessor as Processor

    from skirl.models.qwen3_asr import CHAT_TEMPLATE

    special = (*_CHATML, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
    tokenizer = _qwen_tokenizer(
        special,
        ("<asr_text>", "<timestamp>"),
        texts,
        audio_token="<|audio_pad|>",
        audio_bos_token="<|audio_start|>",
        audio_eos_token="<|audio_end|>",
    )
    ids = tokenizer.convert_tokens_to_ids
    ends = [ids("<|endoftext|>"), ids("<|im_end|>")]
    config = Qwen3ASRConfig(
        audio_config=_qwen_encoder(hidden, layers) | {"initializer_range": initializer_range},
        text_config=_decoder(tokenizer, hidden, layers)
        | {"model_type": "qwen3", "head_dim": hidden // 4, "initializer_range": initializer_range},
        audio_token_id=ids("<|audio_pad|>"),
        timestamp_token_id=ids("<timestamp>"),
        eos_token_id=ends,
        pad_token_id=ids("<|im_end|>"),
        tie_word_embeddings=True,
    )
    processor = Processor(Qwen3ASRFeatureExtractor(), tokenizer, chat_template=CHAT_TEMPLATE)
    native = directory / "native" if original_layout else directory
    _save(Qwen3ASRForConditionalGeneration, config, processor, native, ends=ends, pad=ids("<|im_end|>"), seed=seed)
    if original_layout:
        _convert_to_original(native, directory)
    return directory


def tiny_qwen2_audio(directory: Path, *, window_seconds: int = 15, seed: int = 0) -> Path:
    """Qwen2-Audio; hears ``window_seconds`` and no more. Returns the directory."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor

    tokenizer = _qwen_tokenizer((*_CHATML, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"))
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2AudioConfig(
        audio_config=_whisper_encoder(window_seconds),
        text_config=_decoder(tokenizer, 32, 2) | {"model_type": "qwen2"},
        audio_token_index=ids("<|AUDIO|>"),
    )
    processor = Qwen2AudioProcessor(_whisper_features(window_seconds), tokenizer)
    ends = [ids("<|endoftext|>"), ids("<|im_end|>")]
    _save(Qwen2AudioForConditionalGeneration, config, processor, directory, ends=ends, pad=ends[0], seed=seed)
    return directory


def tiny_glm_asr(directory: Path, *, window_seconds: int = 6, seed: int = 0) -> Path:
    """GLM-ASR; ``window_seconds`` is even. Returns the directory."""
    from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration, GlmAsrProcessor

    special = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
    special += ("<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>")
    tokenizer = _plain_tokenizer(special, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    ids = tokenizer.convert_tokens_to_ids
    ends = [ids("<|endoftext|>"), ids("<|user|>")]
    config = GlmAsrConfig(
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 128,
            "max_position_embeddings": 50 * window_seconds,
        },
        text_config=_decoder(tokenizer, 32, 2) | {"model_type": "llama", "eos_token_id": ends},
        audio_token_id=ids("<|pad|>"),
    )
    processor = GlmAsrProcessor(_whisper_features(window_seconds), tokenizer, chat_template=_GLM_TEMPLATE)
    _save(GlmAsrForConditionalGeneration, config, processor, directory, ends=ends, pad=ends[0], seed=seed)
    return directory


def tiny_voxtral(directory: Path, *, window_seconds: int = 6, seed: int = 0) -> Path:
    """Voxtral, with a byte tokenizer that has Mistral's control tokens at Mistral's ids; ``window_seconds`` is even.

    Returns the directory.
    """
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration, VoxtralProcessor

    control = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"}
    control |= {24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
    first = [control.get(i, f"<SPECIAL_{i}>") for i in range(36)]
    tokenizer = _plain_tokenizer((), first=first, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    config = VoxtralConfig(
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 128,
            "max_source_positions": 50 * window_seconds,
        },
        text_config=_decoder(tokenizer, 32, 2) | {"model_type": "llama", "head_dim": 16},
        audio_token_id=24,
    )
    processor = VoxtralProcessor(_whisper_features(window_seconds), tokenizer)
    _save(VoxtralForConditionalGeneration, config, processor, directory, ends=[2], pad=2, seed=seed)
    return directory


def tiny_audio_flamingo_3(directory: Path, *, window_seconds: int = 6, seed: int = 0) -> Path:
    """Audio Flamingo 3. Returns the directory."""
    from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration, AudioFlamingo3Processor

    tokenizer = _qwen_tokenizer((*_CHATML, "<sound>"))
    ids = tokenizer.convert_tokens_to_ids
    config = AudioFlamingo3Config(
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_mel_bins": 128,
            "max_source_positions": 50 * window_seconds,
        },
        text_config=_decoder(tokenizer, 32, 2) | {"model_type": "qwen2"},
        audio_token_id=ids("<sound>"),
    )
    processor = AudioFlamingo3Processor(_whisper_features(window_seconds), tokenizer, chat_template=_FLAMINGO_TEMPLATE)
    ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
    _save(AudioFlamingo3ForConditionalGeneration, config, processor, directory, ends=ends, pad=ends[1], seed=seed)
    return directory


def tiny_qwen3(
    directory: Path,
    *,
    tied: bool = True,
    hidden: int = 64,
    layers: int = 2,
    texts: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Qwen3, text only, with a ChatML template. Arguments as in ``tiny_qwen3_asr``.

    Args:
        tied: the head is the embeddings, or a matrix of its own.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _qwen_tokenizer(_CHATML, (), texts)
    tokenizer.chat_template = _CHATML_TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
    decoder = _decoder(tokenizer, hidden, layers) | {"head_dim": hidden // 2, "tie_word_embeddings": tied}
    config = Qwen3Config(**decoder, eos_token_id=ends[0], bos_token_id=None)
    _save(Qwen3ForCausalLM, config, tokenizer, directory, ends=ends, pad=ends[1], seed=seed)
    return directory


def tiny_qwen3_moe(
    directory: Path,
    *,
    experts: int = 4,
    hidden: int = 64,
    layers: int = 2,
    texts: Sequence[str] | None = None,
    seed: int = 0,
) -> Path:
    """Qwen3-MoE, text only, two experts a token, stored one by one as released. Arguments as in ``tiny_qwen3``.

    Args:
        experts: of each layer.
        hidden: a multiple of 32, which vLLM's kernels for the CPU ask for.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = _qwen_tokenizer(_CHATML, (), texts)
    tokenizer.chat_template = _CHATML_TEMPLATE
    ids = tokenizer.convert_tokens_to_ids
    ends = [ids("<|im_end|>"), ids("<|endoftext|>")]
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    }
    decoder = _decoder(tokenizer, hidden, layers) | {"head_dim": 32, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**decoder, **mixture, eos_token_id=ends[0], bos_token_id=None)
    _save(Qwen3MoeForCausalLM, config, tokenizer, directory, ends=ends, pad=ends[1], seed=seed)
    return directory


# -------------------------------------------------------------------------------------------------------------- configs
def _qwen_encoder(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "d_model": hidden,
        "encoder_layers": layers,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * hidden,
        "downsample_hidden_size": 16,
        "output_dim": hidden,
        "n_window": 50,
        "n_window_infer": 800,
    }


def _decoder(tokenizer: Any, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    }


def _whisper_encoder(window_seconds: int) -> dict[str, Any]:
    return {
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "num_mel_bins": 128,
        "max_source_positions": 50 * window_seconds,
    }


def _whisper_features(window_seconds: int) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=128, chunk_length=window_seconds)


# Chat templates as in the releases, for one user turn with one clip and an instruction.
_GLM_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}{{ '<|begin_of_audio|><|pad|><|end_of_audio|><|user|>\\n' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_FLAMINGO_TEMPLATE = (
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content if part.type == 'audio' %}{{ '<sound>' }}{% endfor %}"
    "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# ----------------------------------------------------------------------------------------------------------- tokenizers
def _bytes_with_merges(texts: Sequence[str] | None, first: Sequence[str] = ()) -> Any:
    """Byte-level BPE; merges until the words of the texts are single tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 256 + (_MAX_MERGES if texts else 0),
        min_frequency=1,
        special_tokens=list(first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts or [], trainer)
    return bpe


def _qwen_tokenizer(
    special: Sequence[str], plain: Sequence[str] = (), texts: Sequence[str] | None = None, **named: str
) -> Any:
    """Qwen's tokenizer class; ``plain`` tokens survive decoding without special tokens."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    bpe = _bytes_with_merges(texts)
    bpe.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    bpe.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return Qwen2Tokenizer(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,  # pyright: ignore[reportArgumentType]
        extra_special_tokens=named,
    )


def _plain_tokenizer(special: Sequence[str], *, first: Sequence[str] = (), **named: str) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    bpe = _bytes_with_merges(None, first)
    bpe.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **named)


# -------------------------------------------------------------------------------------------------------------- writing
def _save(
    model_class: Any, config: Any, processor: Any, directory: Path, *, ends: list[int], pad: int, seed: int
) -> None:
    import torch
    from transformers import GenerationConfig

    from skirl.models import checkpoints
    from skirl.models.families import FAMILIES, TEXT
    from skirl.models.loading import quiet_transformers

    family = FAMILIES.get(config.model_type, TEXT)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad, do_sample=False)
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures, config.dtype = [model_class.__name__], "float32"
    weights = {checkpoints.rename(name, family.disk_prefixes): p for name, p in model.named_parameters()}
    with quiet_transformers():
        config.save_pretrained(directory)
        model.generation_config.save_pretrained(directory)
        processor.save_pretrained(directory)
    checkpoints.write_weights(directory, weights)


def _convert_to_original(native: Path, directory: Path) -> None:
    import shutil

    from skirl.models.loading import export_model, load_model

    loaded = load_model(native, dtype="float32")
    export_model(loaded, loaded.model.state_dict(), directory, "original")
    shutil.rmtree(native)
