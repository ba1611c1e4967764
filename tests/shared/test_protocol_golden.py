"""Tests the wire, byte by byte. If one of them fails, two versions cannot talk to each other: bump `VERSION`."""

import msgspec
import pytest
from msgspec import Struct

from shared import protocol
from shared.protocol import VERSION, encode
from tests.shared import wire_examples

SIDES = {
    "FROM_GATEWAY": (wire_examples.FROM_GATEWAY, protocol.decode_from_gateway, protocol.GatewayToScheduler),
    "TO_GATEWAY": (wire_examples.TO_GATEWAY, protocol.decode_to_gateway, protocol.SchedulerToGateway),
    "TO_WORKER": (wire_examples.TO_WORKER, protocol.decode_to_worker, protocol.SchedulerToWorker),
    "FROM_WORKER": (wire_examples.FROM_WORKER, protocol.decode_from_worker, protocol.WorkerToScheduler),
}
EXAMPLES = {f"{side}.{type(one).__name__}": one for side, (examples, _, _) in SIDES.items() for one in examples}

GOLDEN_VERSION = 13
GOLDEN = {
    "FROM_GATEWAY.Hello": ("930101ab676174657761792d312d61"),
    "FROM_GATEWAY.Submit": (
        "dc00100209c40c01000000020000007011010002dc001340cfffffffffffffffffcb3fe0000000000000cb3feccccccccc"
        "cccd28cb3fa999999999999acb3fd0000000000000cbbfd0000000000000cb3ff8000000000000919207cbc05900000000"
        "0000029200020100a873746172743a2041c402020292910392040594149106920708c3920b0a0203ffcb3ff80000000000"
        "0005c3aa63686174636d706c2d37940c010a0ba473616c74a9616461707465725f31a431613262"
    ),
    "FROM_GATEWAY.Abort": ("93030903"),
    "FROM_GATEWAY.Heartbeat": ("9304ab676174657761792d312d6193cb3fe0000000000000cb4029000000000000cb400a000000000000"),
    "FROM_GATEWAY.ResetPrefixCache": ("920509"),
    "FROM_GATEWAY.AddAdapter": ("950609a9616461707465725f31ab2f61646170746572732f31c3"),
    "FROM_GATEWAY.RemoveAdapter": ("930709a9616461707465725f31"),
    "TO_GATEWAY.Welcome": (
        "980101a130a46230303798a4736d6f6cb04c6c616d61466f7243617573616c4c4da7666c6f61743332cd2000cdc000a26631"
        "a27731a27431cd1000cc809193a9616461707465725f31ab2f61646170746572732f31a26431"
    ),
    "TO_GATEWAY.Progress": (
        "9202919a090305912a9194cbbfe00000000000000292040592cbbfd0000000000000cbbfe00000000000009194cbbfe00000"
        "000000000292040592cbbfd0000000000000cbbfe0000000000000a56572726f7210a377687993cb3fe80000000000000294"
        "0c010a0b"
    ),
    "TO_GATEWAY.Refused": ("950309aa71756575655f66756c6ca466756c6ccb4004000000000000"),
    "TO_GATEWAY.Status": (
        "9504c3c2dc002d0102030405060708090a0b0c0d0e0f101112131415161718930102031acb403b8000000000001c1dc31f20"
        "2122232425262728292a2b91a16191a16293cb3fe0000000000000cb4029000000000000cb400a000000000000"
    ),
    "TO_GATEWAY.Accepted": ("920592090a"),
    "TO_GATEWAY.UnknownGateway": ("9106"),
    "TO_GATEWAY.PrefixCacheReset": ("920709"),
    "TO_GATEWAY.AdapterAnswer": ("930809ae6e6f207375636820666f6c646572"),
    "TO_WORKER.Configure": ("980192a4623030370310cd03e8cc80cd1000cd0280cd01f4"),
    "TO_WORKER.StepPlan": (
        "9d0292a4623030370307919400020101919800c40c01000000020000007011010002920809dc001340cfffffffffffffff"
        "ffcb3fe0000000000000cb3feccccccccccccd28cb3fa999999999999acb3fd0000000000000cbbfd0000000000000cb3f"
        "f8000000000000919207cbc059000000000000029200020100a873746172743a2041c40202029291039204059414910692"
        "0708c3920b0a03aa63686174636d706c2d37019192009192010191930002910a9192080b910591920c039192040d919201"
        "119192002a"
    ),
    "TO_WORKER.Stop": ("9103"),
    "TO_WORKER.LoadAdapter": ("930411ab2f61646170746572732f31"),
    "TO_WORKER.UnloadAdapter": ("920611"),
    "FROM_WORKER.Register": (
        "dc00110101aa776f726b65722d312d610304cd1092a363707598a4736d6f6cb04c6c616d61466f7243617573616c4c4da76"
        "66c6f61743332cd2000cdc000a26631a27731a27431cdb400ce80000000cb3f9eb851eb851eb8cb3f40624dd2f1a9fcce40"
        "000000cb41cdcd6500000000040802"
    ),
    "FROM_WORKER.StepResult": (
        "950292a4623030370307919500912a9194cbbfe00000000000000292040592cbbfd0000000000000cbbfe000000000000091"
        "94cbbfe00000000000000292040592cbbfd0000000000000cbbfe0000000000000a96e6f20776179206f6ecb3f9eb851eb85"
        "1eb8"
    ),
    "FROM_WORKER.Fault": ("950392a4623030370307a954726163656261636bc3"),
    "FROM_WORKER.Heartbeat": ("9304aa776f726b65722d312d6193cb3fe0000000000000cb4029000000000000cb400a000000000000"),
    "FROM_WORKER.Configured": ("920592a46230303703"),
    "FROM_WORKER.Leave": ("9106"),
    "FROM_WORKER.AdapterLoaded": ("930911a26431"),
    "FROM_WORKER.AdapterRefused": ("930a11ae6e6f207375636820666f6c646572"),
}


def test_the_version_goes_with_the_bytes() -> None:
    assert VERSION == GOLDEN_VERSION


@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_are_as_they_were(name: str) -> None:
    assert encode(EXAMPLES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_decode_to_what_was_encoded(name: str) -> None:
    _, decode, _ = SIDES[name.partition(".")[0]]
    assert decode(bytes.fromhex(GOLDEN[name])) == EXAMPLES[name]


@pytest.mark.parametrize("side", SIDES)
def test_each_message_has_an_example(side: str) -> None:
    examples, _, union = SIDES[side]
    assert [type(one) for one in examples] == list(union.__args__)


def test_examples_set_every_field() -> None:
    """Otherwise a change of a field's type or position could go unnoticed."""
    for name, example in EXAMPLES.items():
        for field in msgspec.structs.fields(example):
            assert field.default is msgspec.NODEFAULT or getattr(example, field.name) != field.default, (name, field)


def structs_of(value: object) -> list[Struct]:
    if isinstance(value, (list, tuple)):
        return [struct for item in value for struct in structs_of(item)]
    if not isinstance(value, Struct):
        return []
    parts = [getattr(value, field.name) for field in msgspec.structs.fields(value)]
    return [value, *(struct for part in parts for struct in structs_of(part))]


def test_everything_on_the_wire_is_a_closed_frozen_array() -> None:
    types = {type(struct) for example in EXAMPLES.values() for struct in structs_of(example)}
    assert len(types) > len(EXAMPLES)
    for type_ in types:
        config = type_.__struct_config__
        assert config.array_like, type_
        assert config.forbid_unknown_fields, type_
        assert config.frozen, type_
