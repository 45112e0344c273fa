"""The text that the example learns: sources of the Python standard library, as bytes."""

import pathlib
import sysconfig

import numpy as np

TRAIN_BYTES = 1 << 20
HELD_OUT_BYTES = 1 << 17  # one file in eight, as far into the alphabet as the others
VOCABULARY = 256


def load() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [TRAIN_BYTES] to train on and [HELD_OUT_BYTES] from other files to evaluate on."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        part = held_out if index % 8 == 7 else train
        part += path.read_bytes()
    if len(train) < TRAIN_BYTES or len(held_out) < HELD_OUT_BYTES:
        raise SystemExit(f"{folder} holds too few Python sources to train on")
    return (
        np.frombuffer(bytes(train[:TRAIN_BYTES]), np.uint8),
        np.frombuffer(bytes(held_out[:HELD_OUT_BYTES]), np.uint8),
    )


def unigram_entropy(text: np.ndarray) -> float:
    """The loss, in nats per byte, of a model that knows how frequent each byte is and no more."""
    frequency = np.bincount(text, minlength=VOCABULARY) / text.size
    frequency = frequency[frequency > 0]
    return float(-np.sum(frequency * np.log(frequency)))


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """int32 [len(starts), length + 1]: what is read and, one byte later, what is predicted."""
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
