"""Small data sets on disk, written by the tests themselves with the standard library and Pillow."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from conadv.task.data import Source

Sample = tuple[str, bytes]


def picture(seed: int, height: int = 12, width: int = 16, channels: int = 3) -> np.ndarray:
    """Smooth colours with some noise, so that a JPEG of it is not all artefacts."""
    random = np.random.default_rng(seed)
    slopes = random.uniform(-1, 1, (channels, 2))
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    planes = [128 + 70 * (a * y + b * x) for a, b in slopes]
    noisy = np.stack(planes, axis=-1) + random.normal(0, 6, (height, width, channels))
    return noisy.clip(0, 255).astype(np.uint8)


def images_of(source: Source) -> np.ndarray:
    """All images of a source, (N, H, W, C)."""
    return np.stack([source.image(index) for index in range(len(source))])


def encode(pixels: np.ndarray, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    image.save(file, form, **options)
    return file.getvalue()


def jpeg_set(count: int, classes: int = 2, **size: int) -> list[tuple[bytes, int]]:
    """(bytes of a JPEG, label), labels in order so that every layout lists them alike."""
    return [(encode(picture(i, **size), quality=92), i * classes // count) for i in range(count)]


def write_tar(path: Path, members: list[Sample]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def members_of(samples: list[tuple[bytes, int]], first: int = 0) -> list[Sample]:
    pairs = [
        ((f"{first + i:04d}.jpg", data), (f"{first + i:04d}.cls", str(label).encode()))
        for i, (data, label) in enumerate(samples)
    ]
    return [member for pair in pairs for member in pair]


def write_shards_by_hand(root: Path, train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> Path:
    """Two training shards and one for the test."""
    middle = len(train) // 2
    write_tar(root / "toy-train-0.tar", members_of(train[:middle]))
    write_tar(root / "toy-train-1.tar", members_of(train[middle:], middle))
    write_tar(root / "toy-val-0.tar", members_of(test))
    return root


def write_folder(root: Path, train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> Path:
    for part, samples in (("train", train), ("val", test)):
        for index, (data, label) in enumerate(samples):
            place = root / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{index:04d}.JPEG").write_bytes(data)
    return root


def write_table(path: Path, samples: list[tuple[bytes | None, int | None]], names: list[str] | None = None) -> Path:
    """Parquet as the hub has it; with `names` of classes, the features are noted in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [{"bytes": data, "path": None} for data, _ in samples]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {"image": pa.array(pictures, kind), "label": pa.array([label for _, label in samples], pa.int64())}
    )
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=3)
    return path


def write_hub(root: Path, train: list[tuple[bytes, int]], test: list[tuple[bytes, int]]) -> str:
    """Two files of training images and one for the test."""
    write_table(root / "data" / "train-00000-of-00002.parquet", train[:5])
    write_table(root / "data" / "train-00001-of-00002.parquet", train[5:])
    write_table(root / "data" / "test-00000-of-00001.parquet", test)
    return f"hf:{root}"


def cifar(classes: int) -> tuple[dict[str, bytes], np.ndarray, list[int]]:
    """The files of a small CIFAR with class names name0, name1, ...; its training pixels and labels."""
    parts = [f"data_batch_{n}" for n in range(1, 6)] if classes == 10 else ["train"]
    label_key, name_key = (b"labels", b"label_names") if classes == 10 else (b"fine_labels", b"fine_label_names")
    files, pixels, labels = {}, [], []
    for number, part in enumerate([*parts, "test_batch" if classes == 10 else "test"]):
        pixels.append(np.random.default_rng(number).integers(0, 256, (4, 3072), dtype=np.uint8))
        labels.append([(7 * number + i) % classes for i in range(4)])
        files[part] = pickle.dumps({b"data": pixels[-1], label_key: labels[-1], b"x": None}, protocol=3)
    meta = {name_key: [f"name{n}".encode() for n in range(classes)]}
    files["batches.meta" if classes == 10 else "meta"] = pickle.dumps(meta, protocol=3)
    return files, np.concatenate(pixels[:-1]), [label for part in labels[:-1] for label in part]


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
