"""Another client of a store on the emulated device: ``store_reader.py SOCKET``.

Each line of its input is a word and an object's id; each line of its output answers one: ``digest``, ``write``,
``hold``.
"""

import hashlib
import sys

import torch

from disco_accel.errors import DiscoError
from disco_accel.store.client import Store
from tests.emulated import device

store = Store.connect(sys.argv[1])
held = []


def answer(word: str, id: int) -> str:
    """What came of it."""
    tensor = store.get(id)
    if word == "write":
        try:
            tensor.add_(1)
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            device.release()
    if word == "hold":
        held.append(tensor)
    return f"{tensor.device.type} {hashlib.sha256(bytes(tensor.cpu().view(torch.uint8).numpy())).hexdigest()}"


for line in sys.stdin:
    order, name = line.split()
    try:
        print(answer(order, int(name)), flush=True)
    except DiscoError as failed:
        print(type(failed).__name__, failed, flush=True)
