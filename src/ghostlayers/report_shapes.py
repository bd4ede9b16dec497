"""What a report relies on in the files it reads."""

from __future__ import annotations

from .json_shape import Maybe, Values

MATRIX = [[float]]
WINDOWS = {
    "source": str,
    "windows": Maybe(int),
    "window": Maybe(int),
    "tokens": Maybe(int),
    "bos_per_window": Maybe(bool),
    "ids_sha256": Maybe(str),
}
ACCURACY = {
    "value": float,
    "stderr": Maybe(float),
    "difference": Maybe(float),
    "difference_stderr": Maybe(float),
    "retained": Maybe(float),
}
TASKS = {
    "scores": [
        {
            "task": str,
            "items": Maybe(int),
            "num_fewshot": Maybe(int),
            "acc": Maybe(ACCURACY),
            "acc_norm": Maybe(ACCURACY),
        }
    ],
    "average": {"acc": Maybe(ACCURACY), "acc_norm": Maybe(ACCURACY)},
    "not_run": Maybe(Values(str)),
    "limit": Maybe(int),
}
TIMES = {"median_s": float, "iqr_s": Maybe(float), "speedup": Maybe(float)}
SHARE = {"median_s": Maybe(float), "share": Maybe(float)}
SPEED = {
    "num_layers": int,
    "parameters": Maybe(int),
    "parameter_bytes": Maybe(int),
    "promised_speedup": Maybe(float),
    "operators": Maybe(int),
    "rows": [
        {
            "batch_size": int,
            "length": int,
            "prefill": TIMES,
            "decode": TIMES,
            "operator": Maybe({"prefill": SHARE, "decode": SHARE}),
            "peak_memory_bytes": Maybe(float),
        }
    ],
}
TRIED = {
    "operator": str,
    "against": str,
    "ridge": Maybe(float),
    "against_ridge": Maybe(float),
    "gain": Maybe(float),
    "gain_standard_error": Maybe(float),
    "required_standard_errors": Maybe(float),
    "kept": Maybe(bool),
}
ERRORS = {
    "error_before": Maybe(float),
    "error_after": Maybe(float),
    "held_out_error_before": Maybe(float),
    "held_out_error_after": Maybe(float),
}
BOUNDARIES = [
    {
        "start": int,
        "stop": int,
        "operator": str,
        **ERRORS,
        "guard": Maybe({"tried": Maybe([TRIED]), "chosen": Maybe(str), "fit": Maybe(ERRORS)}),
    }
]
GUARD = {
    "recovered_share": Maybe(float),
    "loss_dense": Maybe(float),
    "loss_none": Maybe(float),
    "loss_chosen": Maybe(float),
    "windows": Maybe(int),
    "skipped": Maybe(str),
}
RECORD = {
    "num_layers": int,
    "removed": [int],
    "boundaries": BOUNDARIES,
    "selector": str,
    "recover": str,
    "guard": Maybe(GUARD),
    "calibration": Maybe(WINDOWS),
    "config": Maybe({"fit": Maybe(str)}),
    "source": Maybe({"model": Maybe(str)}),
    "versions": Maybe(Values(str)),
    "dtype": Maybe(str),
}
GAPPED = [[Maybe(float)]]
ANALYSIS = {
    "model": str,
    "similarity": MATRIX,
    "block_influence": [float],
    "rls": Maybe(float),
    "num_clusters": int,
    "recoverability": Maybe(
        {
            "error_before": GAPPED,
            "error_after": GAPPED,
            "tokens": Maybe(int),
            "held_out_tokens": Maybe(int),
        }
    ),
    "calibration": WINDOWS,
    "versions": Maybe(Values(str)),
}
EVALUATION = {
    "results": [
        {
            "path": str,
            "dtype": Maybe(str),
            "parameters": Maybe(int),
            "perplexity": Maybe(float),
            "window_losses": Maybe([float]),
            "texts": Maybe(
                [{**WINDOWS, "perplexity": Maybe(float), "window_losses": Maybe([float])}]
            ),
            "tasks": Maybe(TASKS),
            "speed": Maybe(SPEED),
        }
    ],
    "versions": Maybe(Values(str)),
}
PERPLEXITIES = Values({"perplexity": Maybe(float), "standard_error": Maybe(float)})
MEASURED = {"perplexity": PERPLEXITIES, "tasks": Maybe(TASKS), "speed": Maybe(SPEED)}
PLACE = {"calibration": str, "num_windows": int, "layers": [int], "refused": Maybe(str)}
LINES = {
    "run": {
        "model": {"name": str, "num_layers": int, "dtype": Maybe(str), "parameters": Maybe(int)},
        "versions": Values(str),
        "created": str,
        "settings": Values(object),
        "machine": Values(object),
        "title": Maybe(str),
        "planned": Maybe(
            {
                "model": Maybe(str),
                "settings": Values(object),
                "calibrations": [str],
                "texts": [str],
                "smoke": Maybe(bool),
            }
        ),
        "commit": Maybe(str),
        "command": Maybe([str]),
    },
    "calibration": {
        "name": str,
        "num_windows": int,
        "hash": str,
        "window": int,
        "tokens": int,
        "calibration": Values(object),
        "similarity": MATRIX,
        "block_influence": [float],
        "clusters": [int],
        "rls": Maybe(float),
        "num_clusters": int,
    },
    "dense": MEASURED,
    "cut": {**PLACE, "selector": str, "num_remove": int},
    "cell": {
        **PLACE,
        **MEASURED,
        "operator": str,
        "fit": str,
        "selector": Maybe(str),
        "used": [str],
        "boundaries": BOUNDARIES,
        "guard": Maybe(GUARD),
        "warnings": [str],
    },
}
