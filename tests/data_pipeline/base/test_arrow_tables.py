"""Tables of rows."""

import pyarrow as pa

from data_pipeline.base.arrow_tables import table_of


def test_a_table_of_rows_is_the_one_that_pyarrow_makes_of_them():
    schema = pa.schema([("a", pa.string()), ("b", pa.large_string()), ("c", pa.int64()), ("d", pa.bool_())])
    some = [("é😀", None, 3, True), ("", "x\0y", None, None), (None, "", -(2**63), False)]
    for rows in ([], some[:1], some * 7, [(None,) * 4] * 9):
        table = table_of(rows, schema)
        table.validate(full=True)
        assert table == table_of([(a and a.encode(), *others) for a, *others in rows], schema)
        assert table.equals(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema))
