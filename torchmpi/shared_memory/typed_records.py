"""Records in memory, declared once: what kernels and Python read by name is a class.

    class Tensor(Record):
        begin = Word()
        address = Word()

    class Group(Record):
        rank = Word()
        tensors = Pointer(Tensor)
        spent = Array(2)
        expired = Atomic()

A record is a row of 64-bit fields, in the order of the declarations. The class gives the number of a field
(``Group.tensors`` is 1); the address of a record, as a value of the class, gives what is stored there. So it is in
kernels, where such a value costs what the address costs (see :mod:`torchmpi.shared_memory.compiler.addresses`), and in
Python:

============ ======================== ======================================================================
field        ``Group.field``          ``group.field``
============ ======================== ======================================================================
`Word`       its number               the number or address stored there; can be assigned
`Pointer`    its number               the record whose address is stored there; can be assigned
`Embedded`   number of the first one  the record that begins there
`Array`      number of the first one  the words that begin there: ``group.spent[1]``
`Atomic`     its number               its address: each access says its memory order, as in `load_acquire`
============ ======================== ======================================================================

``tensors[3]`` is the third record after this one. A record is false if its address is 0. `FIELDS` and `BYTES` of a
class are the size of a record without the arrays of unknown length at its end.
"""

from __future__ import annotations

import ctypes
import operator
from array import array
from typing import Any, ClassVar, Generic, SupportsIndex, TypeVar, cast, overload

R = TypeVar("R", bound="Record")
T = TypeVar("T")


class Field(Generic[T]):
    """A field of a record, or several in a row; `at` leaves a gap before it."""

    number: int

    def __init__(self, size: int = 1, *, at: int | None = None) -> None:
        self.size, self.at = size, at

    @overload
    def __get__(self, record: None, owner: type) -> int: ...
    @overload
    def __get__(self, record: Record, owner: type) -> T: ...
    def __get__(self, record: Record | None, owner: type) -> int | T:
        return self.number if record is None else self.value_in(record)

    def value_in(self, record: Record) -> T:
        """Return what the name of the field stands for in a record."""
        raise NotImplementedError


class Word(Field[int]):
    """A number, or the address of something that is not a record."""

    def value_in(self, record: Record) -> int:
        """Return the number."""
        return int(record.cells[self.number])

    def __set__(self, record: Record, value: int) -> None:
        record.cells[self.number] = value


class RecordType(type):
    """The type of the classes of records."""

    fields: dict[str, Field[Any]]
    FIELDS: int
    BYTES: int
    _view: RecordType
    _awaited: ClassVar[list[Pointer[Any]]] = []
    """Pointers to classes that are not defined yet."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> RecordType:
        """Number the fields, after those of the base class."""
        base = next((each for each in bases if isinstance(each, RecordType)), None)
        fields = dict(base.fields) if base is not None else {}
        position = base.FIELDS if base is not None else 0
        declared = {key: value for key, value in namespace.items() if isinstance(value, Field)}
        if taken := [key for key in declared if hasattr(base, key)]:
            raise TypeError(f"{name} cannot have a field with the name {taken[0]}, which has another meaning")
        for field in declared.values():
            field.number = position if field.at is None else field.at
            position = max(position, field.number + field.size)
        numbers = {key: field.number for key, field in declared.items()}
        made = super().__new__(cls, name, bases, {**namespace, **numbers, "__slots__": ()})
        made.fields, made.FIELDS, made.BYTES = {**fields, **declared}, position, 8 * position
        # Its instances have the fields as properties; so the class itself has plain numbers.
        made._view = super().__new__(cls, name, (made,), {**made.fields, "__slots__": ()})
        made._view.fields, made._view.FIELDS, made._view.BYTES = made.fields, made.FIELDS, made.BYTES
        made._view._view = made._view
        cls._awaited += [each for each in declared.values() if isinstance(each, Pointer)]
        for pointer in cls._awaited:
            if pointer.record == name:
                pointer.record = made
        cls._awaited = [each for each in cls._awaited if isinstance(each.record, str)]
        return made

    def __call__(cls, *args: Any) -> Any:
        """Return the record at an address."""
        return super(RecordType, cls._view).__call__(*args)


class _Base:
    __slots__ = ("_address", "_cells")


class Record(_Base, metaclass=RecordType):
    """The record at an address, in the memory of this process.

    Args:
        address: The address.
        cells: What holds its fields and keeps them alive; by default they are read where they are.

    >>> class Point(Record):
    ...     x = Word()
    ...     y = Word()
    >>> point = Point.new()
    >>> point.y = 7
    >>> Point.y, point.y, Point(int(point)).y, Point.BYTES
    (1, 7, 7, 16)
    """

    def __init__(self, address: SupportsIndex, cells: Any = None) -> None:
        self._address, self._cells = operator.index(address), cells

    @classmethod
    def new(cls: type[R], extra: int = 0) -> R:
        """Return a record of zeros, with `extra` fields after the known ones."""
        cells = array("q", bytes(cls.BYTES + 8 * extra))
        return cls(cells.buffer_info()[0], cells)

    def write(self: R, **values: SupportsIndex) -> R:
        """Write numbers, or addresses, to fields by name, and return the record."""
        fields = type(self).fields
        for name, value in values.items():
            self.cells[fields[name].number] = operator.index(value)
        return self

    @classmethod
    def cells_at(cls, address: int) -> Any:
        """Return the fields of a record at an address."""
        return (ctypes.c_int64 * cls.FIELDS).from_address(address)

    @property
    def cells(self) -> Any:
        """The fields by number."""
        if self._cells is None:
            self._cells = self.cells_at(self._address)
        return self._cells

    def address_of(self, field: Field[Any]) -> int:
        """Return the address of a field."""
        return self._address + 8 * field.number

    @classmethod
    def words(cls, address: int) -> Words:
        """Return the words at an address."""
        return Words(address)

    def __getitem__(self: R, index: int) -> R:
        """Return the record that follows in a row of such records."""
        return type(self)(self._address + index * type(self).BYTES)

    def __bool__(self) -> bool:
        return self._address != 0

    def __int__(self) -> int:
        return self._address

    __index__ = __int__

    def __add__(self, num_bytes: int) -> int:
        return self._address + int(num_bytes)

    def __rsub__(self, address: int) -> int:
        return address - self._address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | Record) and self._address == int(other)

    def __hash__(self) -> int:
        return hash(self._address)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._address:#x})"


class Words(Record):
    """A row of words."""

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return ctypes.c_int64.from_address(self._address + 8 * index).value

    def __setitem__(self, index: int, value: int) -> None:
        ctypes.c_int64.from_address(self._address + 8 * index).value = value


class Pointer(Field[R]):
    """The address of a record, whose class may be given by the name with which it is defined later."""

    def __init__(self, record: type[R] | str, *, at: int | None = None) -> None:
        super().__init__(at=at)
        self.record: Any = record

    def value_in(self, record: Record) -> R:
        """Return the record at the address."""
        return cast("R", self.record(record.cells[self.number]))

    def __set__(self, record: Record, value: R) -> None:
        record.cells[self.number] = int(value)


class Embedded(Field[R]):
    """A record, or several in a row, among the fields of another one."""

    def __init__(self, record: type[R], count: int = 1, *, at: int | None = None) -> None:
        super().__init__(count * record.FIELDS, at=at)
        self.record: Any = record

    def value_in(self, record: Record) -> R:
        """Return the first of them."""
        return cast("R", self.record(record.address_of(self)))


class Array(Field[Words]):
    """Words; 0 for as many as follow the record."""

    def value_in(self, record: Record) -> Words:
        """Return the words."""
        return record.words(record.address_of(self))


class Atomic(Field[int]):
    """A word that other ranks or threads poll."""

    def value_in(self, record: Record) -> int:
        """Return the address of the word."""
        return record.address_of(self)
