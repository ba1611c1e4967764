"""Messages for the tests of this folder."""

from array import array

from shared.protocol import VERSION, Epoch, ModelInfo, Register, Sampling, Submit, pack_tokens

MODEL = ModelInfo("m", "Llama", "float32", 1000, 100, "f")
REGISTER = Register(VERSION, "worker", 0, 1, 77, "cpu", MODEL, 10, 160 * 50, 0.01, 0.001)
EPOCH = Epoch("boot", 1)


def submit(
    id: int, tokens: list[int] | None = None, *, n: int = 1, max_tokens: int = 5, arrival: float = 1.0
) -> Submit:
    prompt = tokens or [1, 2, 3]
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    return Submit(id, pack_tokens(array("i", prompt)), len(prompt), sampling, n, arrival=arrival)
