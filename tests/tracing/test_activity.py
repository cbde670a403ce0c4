"""Series of what programs did over time, from handmade spans whose numbers can be reckoned by hand."""

from iris.tracing import activity
from iris.tracing.activity import Piece
from iris.tracing.chrome import Span


def span(name, program, start, end):
    return Span(name, 0, "SM0", start, end, -1, 0, {"program_id": program})


SPANS = [
    span("compute", 0, 0.0, 10.0),
    span("compute", 0, 12.0, 20.0),
    span("store", 0, 20.0, 23.0),
    # A wait within a tile, and one within that, which ends with it.
    span("store", 1, 2.0, 18.0),
    span("wait", 1, 3.0, 7.0),
    span("barrier", 1, 5.0, 7.0),
    span("store", 1, 18.0, 19.0),
    span("compute", 2, 4.0, None),
    span("fetch", 2, 4.0, 40.0),
    # As rounded times may have it: the next tile begins a little before the end of the one before.
    span("compute", 3, 1.0, 6.0),
    span("compute", 3, 5.5, 8.0),
    span("compute", 3, 9.0, 9.0),
]
KINDS = {"compute": "product", "store": "exchange", "wait": "wait", "barrier": "wait"}


def cut(spans=SPANS):
    return activity.pieces(spans, lambda one: KINDS.get(one.name), lambda one: one.args["program_id"])


def test_pieces_of_a_program_lie_beside_each_other():
    wanted = [
        Piece(0, "product", 0.0, 10.0),
        Piece(0, "product", 12.0, 20.0),
        Piece(0, "exchange", 20.0, 23.0),
        Piece(1, "exchange", 2.0, 3.0),
        Piece(1, "wait", 3.0, 5.0),
        Piece(1, "wait", 5.0, 7.0),
        Piece(1, "exchange", 7.0, 18.0),
        Piece(1, "exchange", 18.0, 19.0),
        Piece(3, "product", 1.0, 5.5),
        Piece(3, "product", 5.5, 8.0),
    ]
    assert cut() == wanted
    assert cut(SPANS[::-1]) == [piece for program in (3, 1, 0) for piece in wanted if piece.program == program]
    assert cut([]) == []


def test_counts():
    times, numbers = activity.counts(cut(), ("product", "exchange", "wait"))
    table = [
        (0.0, 1, 0, 0),
        (1.0, 2, 0, 0),
        (2.0, 2, 1, 0),
        (3.0, 2, 0, 1),
        (5.0, 2, 0, 1),
        (5.5, 2, 0, 1),
        (7.0, 2, 1, 0),
        (8.0, 1, 1, 0),
        (10.0, 0, 1, 0),
        (12.0, 1, 1, 0),
        (18.0, 1, 1, 0),
        (19.0, 1, 0, 0),
        (20.0, 0, 1, 0),
        (23.0, 0, 0, 0),
    ]
    assert list(zip(times, *(numbers[kind] for kind in ("product", "exchange", "wait")), strict=True)) == table
    assert activity.counts(cut(), ("wait",)) == ([3.0, 5.0, 7.0], {"wait": [1, 1, 0]})
    assert activity.counts([], ("wait",)) == ([], {"wait": []})


def test_what_programs_did_at_some_times():
    found = activity.sampled(cut(), (1, 0, 2), (0.0, 2.0, 6.9, 7.0, 10.0, 22.9, 23.0))
    assert found == [
        [None, "exchange", "wait", "exchange", "exchange", None, None],
        ["product", "product", "product", "product", None, "exchange", None],
        [None] * 7,
    ]
