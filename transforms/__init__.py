"""HOW numbers move: pure functions and frozen ops on arrays. numpy and ml_dtypes only."""
