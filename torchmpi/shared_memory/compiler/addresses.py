"""Addresses of records in kernels: a type of Numba for each class of :mod:`torchmpi.shared_memory.typed_records`.

``group.rank`` is one load, ``group.chunks = n`` one store, ``tensors[3]`` an addition. An address is an integer in
machine code, and passes as one where a number is expected. A number does not pass as an address, nor one record for
another: ``Group(number)`` says that there is a group.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import typeconv, typing
from numba.core.errors import NumbaTypeError
from numba.core.imputils import lower_constant
from numba.core.typing import templates
from numba.extending import (
    lower_builtin,
    lower_cast,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
    typeof_impl,
)

from ..typed_records import Array, Embedded, Field, Pointer, RecordType, Word, Words
from .target import TYPING

_WORD = ir.IntType(64)
# mypy knows only some of Numba's functions.
_types: Any = types
_typing: Any = typing
_typeconv: Any = typeconv
_templates: Any = templates


class Address(_types.Type):
    """The address of a record."""

    def __init__(self, record: RecordType) -> None:
        self.record = record
        super().__init__(f"{record.__name__}Address")

    def can_convert_to(self, typing_context: Any, other: Any) -> Any:
        """Allow the use as a number."""
        return _typeconv.Conversion.safe if other == _types.int64 else None


class RecordClass(_types.Callable, _types.Opaque):
    """A class of records: its attributes are numbers of fields, and a call types an address."""

    def __init__(self, record: RecordType) -> None:
        self.record = record
        super().__init__(f"{record.__name__}Class")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """Take a number."""
        return _typing.signature(Address(self.record), _types.int64)

    def get_call_signatures(self) -> Any:
        """Return the only one."""
        return [_typing.signature(Address(self.record), _types.int64)], False

    def get_impl_key(self, sig: Any) -> Any:
        """Return the key of the implementation."""
        return type(self)


@register_model(Address)
class _AddressModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)


register_model(RecordClass)(models.OpaqueModel)


@typeof_impl.register(RecordType)
def _type_of_class(record: RecordType, context: Any) -> RecordClass:
    return RecordClass(record)


@lower_constant(RecordClass)
def _constant_class(context: Any, builder: Any, kind: RecordClass, record: RecordType) -> Any:
    return context.get_dummy_value()


@lower_builtin(RecordClass, _types.int64)
def _record_at(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return arguments[0]


@lower_cast(Address, _types.int64)
def _as_number(context: Any, builder: Any, kind: Any, target: Any, value: Any) -> Any:
    return value


@lower_cast(Address, _types.boolean)
def _as_condition(context: Any, builder: Any, kind: Any, target: Any, value: Any) -> Any:
    return builder.icmp_signed("!=", value, _WORD(0))


@TYPING.register_global(bool)
class _Condition(_templates.AbstractTemplate):
    """The condition of a branch, which Numba would also look for among those of objects."""

    def generic(self, args: Any, kws: Any) -> Any:
        is_known = args[0] in (_types.boolean, _types.int64) or isinstance(args[0], Address)
        return _typing.signature(_types.boolean, args[0]) if is_known else None


@lower_builtin(bool, Address)
def _is_there(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return builder.icmp_signed("!=", arguments[0], _WORD(0))


# --- fields -----------------------------------------------------------------------------------------------------


def _type_of_field(field: Field[Any]) -> Any:
    if isinstance(field, Pointer | Embedded):
        return Address(field.record)
    return Address(Words) if isinstance(field, Array) else _types.int64


@TYPING.register_attr
class _Fields(_templates.AttributeTemplate):
    key = Address

    def generic_resolve(self, address: Any, name: str) -> Any:
        field = address.record.fields.get(name)
        return None if field is None else _type_of_field(field)


@TYPING.register_attr
class _Numbers(_templates.AttributeTemplate):
    key = RecordClass

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return _types.int64 if name in kind.record.fields or name in ("FIELDS", "BYTES") else None


@lower_getattr_generic(RecordClass)
def _number(context: Any, builder: Any, kind: RecordClass, value: Any, name: str) -> Any:
    return _WORD(getattr(kind.record, name))


def _address_of(builder: Any, address: Any, field: Field[Any]) -> Any:
    return builder.add(address, _WORD(8 * field.number))


def _pointer_to(builder: Any, address: Any, field: Field[Any]) -> Any:
    return builder.inttoptr(_address_of(builder, address, field), _WORD.as_pointer())


@lower_getattr_generic(Address)
def _load(context: Any, builder: Any, kind: Address, value: Any, name: str) -> Any:
    field = kind.record.fields[name]
    if isinstance(field, Word | Pointer):
        return builder.load(_pointer_to(builder, value, field), align=8)
    return _address_of(builder, value, field)


@lower_setattr_generic(Address)
def _store(context: Any, builder: Any, sig: Any, arguments: Any, name: str) -> None:
    kind, stored = sig.args
    field = kind.record.fields[name]
    if not isinstance(field, Word | Pointer):
        raise NumbaTypeError(f"{kind.record.__name__}.{name} is an address and cannot be assigned")
    value = context.cast(builder, arguments[1], stored, _type_of_field(field))
    builder.store(value, _pointer_to(builder, arguments[0], field), align=8)


# --- rows -------------------------------------------------------------------------------------------------------


@TYPING.register_global(operator.getitem)
class _Item(_templates.AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if not isinstance(args[0], Address):
            return None
        words = args[0].record is Words
        return _typing.signature(_types.int64 if words else args[0], args[0], _types.int64)


@TYPING.register_global(operator.setitem)
class _SetItem(_templates.AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if not isinstance(args[0], Address) or args[0].record is not Words:
            return None
        return _typing.signature(_types.none, args[0], _types.int64, _types.int64)


def _element(builder: Any, address: Any, index: Any, num_bytes: int) -> Any:
    return builder.add(address, builder.mul(index, _WORD(num_bytes)))


def _word(builder: Any, address: Any, index: Any) -> Any:
    return builder.inttoptr(_element(builder, address, index, 8), _WORD.as_pointer())


@lower_builtin(operator.getitem, Address, _types.int64)
def _item(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    if sig.args[0].record is Words:
        return builder.load(_word(builder, *arguments), align=8)
    address, index = arguments
    return _element(builder, address, index, sig.args[0].record.BYTES)


@lower_builtin(operator.setitem, Address, _types.int64, _types.int64)
def _set_item(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    builder.store(arguments[2], _word(builder, *arguments[:2]), align=8)
    return context.get_dummy_value()
