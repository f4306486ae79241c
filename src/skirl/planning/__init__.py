"""Stage 5: training sequences -> plan; pure."""
