"""What is said about mistakes: the field that is meant, or what to write instead of one that left with version 1.0."""

from __future__ import annotations

import re

from cyclopts import CycloptsError, UnknownOptionError

from conadv.printing import one_line

from .fields import did_you_mean, show
from .recipe import Recipe, flag, flatten

_OWN_LOOP = "drop it, or choose it in your own loop (docs/own-loop.md)"
_DEVICE = "drop it: a run uses a GPU if PyTorch sees one; CUDA_VISIBLE_DEVICES= hides them"

_GPUS = "each GPU is a process of its own: torchrun --nproc-per-node 8 -m conadv train, and the rest of the command"
ADVICE = {
    # fields that version 1.0 removed
    "nonfinite": "drop it: a step that is not finite ends the run, which resumes from its newest checkpoint",
    "skip_limit": "drop it: a step that is not finite ends the run, and none is skipped",
    "diagnose": "drop it: studies/theory/staleness.py measures how far stale twins are from fresh ones",
    "together": "drop it: the passes of a chunk always run one after the other",
    "ema": f"averages of the weights left: {_OWN_LOOP}, where torch.optim.swa_utils.AveragedModel averages weights",
    "rho": f"it is 0.05, as the authors of SAM have it: {_OWN_LOOP}, conadv.Sam(rho=...)",
    "tf32": "drop it, or write deterministic = true, which keeps all digits of float32",
    "eval_train": "drop it: the training accuracy is that of a fixed sample, as large as the test set",
    "attack.name": f"it is PGD: {_OWN_LOOP}, where any conadv.Attack is an attack",
    "optimizer.trust_coefficient": f"it is 0.001; change optimizer.lr instead, or {_OWN_LOOP}, conadv.Lars",
    "optimizer.beta1": f"it is 0.9: {_OWN_LOOP}",
    "optimizer.beta2": f"it is 0.999: {_OWN_LOOP}",
    "optimizer.eps": f"it is 1e-6 for lamb, and 1e-8 for the others: {_OWN_LOOP}",
    "compile": "drop it, or compile the model in your own loop (docs/own-loop.md, examples/compile_loop.py)",
    "checkpoint.minutes": "write checkpoint.every, in steps; a run that is stopped by SIGTERM saves one anyway",
    "data.classes": "drop it: synthetic data has 10 classes, and other data has its own",
    **dict.fromkeys(("data.mixup", "data.cutmix"), f"mixing left: {_OWN_LOOP}, whose loader may mix images"),
    "data.memory": "drop it: each rank keeps up to 1 GiB of decoded images in memory",
    # flags of other programs
    **dict.fromkeys(("gpus", "devices", "nproc_per_node", "num_gpus", "world_size"), _GPUS),
    **dict.fromkeys(("device", "cuda", "gpu"), _DEVICE),
    "learning_rate": "write optimizer.lr, or --optimizer.lr as a flag",
    "wd": "write optimizer.weight_decay, or --optimizer.weight-decay as a flag",
    **dict.fromkeys(("data", "dataset", "data_dir"), "write data.path, or --data.path DIR as a flag"),
    "output_dir": "pass --run-dir DIR",
    **dict.fromkeys(("amp", "fp16", "bf16"), "write precision = 'bf16', or --precision bf16 as a flag"),
}


def explain(error: CycloptsError) -> str:
    """What is wrong with a flag or a file, in one line that ends with what to do."""
    text, token = str(error), getattr(error, "token", None)
    if isinstance(error, UnknownOptionError):
        text = _unknown((error.token.keyword or error.token.value).partition("=")[0]) or text
    tokens = [token] if token else error.argument.tokens if error.argument else []
    source = next((token.source for token in tokens if token.source not in ("", "cli")), "")
    text = re.sub(r"\[([\w.-]+)\]", r"\1", text, count=1)  # cyclopts writes [attack.epsilon] for a key of a file
    return one_line(text if source in text else f"{source}: {text}")


def _unknown(given: str) -> str:
    """What to write instead of a field that left, or of a flag that other programs have; empty if nothing is known."""
    key = given.lstrip("-").replace("][", ".").strip("[]").replace("-", "_")
    if key in ADVICE:
        return f"{given}: {ADVICE[key]}"
    known = list(flatten(Recipe()))
    same = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2] and flag(other) != given]
    if given.startswith("-"):
        return f"unknown option {given}; did you mean {flag(same[0])}?" if same else ""
    return f"unknown field {show(key)}" + (f"; did you mean {same[0]}?" if same else did_you_mean(key, known))
