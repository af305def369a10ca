"""What to write instead of fields that left with version 1.0, and of flags that other programs have."""

_OWN_LOOP = "drop it, or choose it in your own loop (docs/own-loop.md)"
_DEVICE = "drop it: a run uses a GPU if PyTorch sees one; CUDA_VISIBLE_DEVICES= hides them"

GPUS = ("gpus", "devices", "nproc_per_node", "num_gpus", "world_size")
ADVICE = {
    # fields of version 0.2
    "nonfinite": "drop it: a step that is not finite ends the run, which resumes from its newest checkpoint",
    "skip_limit": "drop it: a step that is not finite ends the run, and none is skipped",
    "diagnose": "drop it: studies/theory/staleness.py measures how far stale twins are from fresh ones",
    "together": "drop it: the passes of a chunk always run one after the other",
    "rho": f"it is 0.05, as the authors of SAM have it: {_OWN_LOOP}, conadv.Sam(rho=...)",
    "tf32": "drop it, or write deterministic = true, which keeps all digits of float32",
    "eval_train": "drop it: the training accuracy is that of a fixed sample, as large as the test set",
    "optimizer.trust_coefficient": f"it is 0.001; change optimizer.lr instead, or {_OWN_LOOP}, conadv.Lars",
    "optimizer.beta1": f"it is 0.9: {_OWN_LOOP}",
    "optimizer.beta2": f"it is 0.999: {_OWN_LOOP}",
    "optimizer.eps": f"it is 1e-6 for lamb, and 1e-8 for the others: {_OWN_LOOP}",
    "data.classes": "drop it: synthetic data has 10 classes, and other data has its own",
    "data.memory": "drop it: each rank keeps up to 1 GiB of decoded images in memory",
    # flags of other programs
    **dict.fromkeys(GPUS, "each GPU is a process of its own, which torchrun starts"),
    **dict.fromkeys(("device", "cuda", "gpu"), _DEVICE),
    "learning_rate": "write optimizer.lr, or --optimizer.lr as a flag",
    "wd": "write optimizer.weight_decay, or --optimizer.weight-decay as a flag",
    **dict.fromkeys(("data", "dataset", "data_dir"), "write data.path, or --data.path DIR as a flag"),
    "output_dir": "pass --run-dir DIR",
    **dict.fromkeys(("amp", "fp16", "bf16"), "write precision = 'bf16', or --precision bf16 as a flag"),
}
