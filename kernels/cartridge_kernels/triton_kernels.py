"""The two Triton programs of attention over segments: partial results of work items, and merging.

Owns the arithmetic on tiles and the layout of the tables that they read. Refuses decisions: what is
read by whom stands in the tables. Imported through `triton_backend`, which also interprets it.

Source: online softmax, arXiv 1805.02867, section 3; split-KV decoding with log-sum-exp, FlashInfer,
arXiv 2501.01005, section 2.2.
"""

import triton
import triton.language as tl

# Columns of the table of items, int32.
ITEM_SOURCE = tl.constexpr(0)
ITEM_BEGIN = tl.constexpr(1)
ITEM_END = tl.constexpr(2)
ITEM_FIRST_SLOT = tl.constexpr(3)
ITEM_NUM_ROWS = tl.constexpr(4)
ITEM_LIMIT = tl.constexpr(5)
ITEM_LIMIT_STEP = tl.constexpr(6)
ITEM_KEY_PAGES = tl.constexpr(7)
ITEM_KEY_FIRST_ROW = tl.constexpr(8)
ITEM_KEY_PAGE_TOKENS = tl.constexpr(9)
ITEM_VALUE_PAGES = tl.constexpr(10)
ITEM_VALUE_FIRST_ROW = tl.constexpr(11)
ITEM_VALUE_PAGE_TOKENS = tl.constexpr(12)
ITEM_COLUMNS = tl.constexpr(16)

# Columns of the table of sources, int64: addresses, and strides in elements.
SOURCE_KIND = tl.constexpr(0)
SOURCE_KEYS = tl.constexpr(1)
SOURCE_VALUES = tl.constexpr(6)
SOURCE_SCALES = tl.constexpr(11)
SOURCE_COLUMNS = tl.constexpr(16)
"""Keys and values: address, strides of page, head, token, channel; scales: without the token's."""

# How values are scaled.
UNSCALED = tl.constexpr(0)
BY_CHANNEL = tl.constexpr(1)
BY_PAGE = tl.constexpr(2)


@triton.jit
def _column(sources, source, COLUMN: tl.constexpr):
    return tl.load(sources + source * SOURCE_COLUMNS + COLUMN)


@triton.jit
def _head_rows(sources, source, head, COLUMN: tl.constexpr, TYPE: tl.constexpr):
    """Pointer to the first number of a head in page 0."""
    pointer = _column(sources, source, COLUMN).to(tl.pointer_type(TYPE))
    return pointer + head * _column(sources, source, COLUMN + 2)


@triton.jit
def _pages_and_places(pages, first_page, places, is_read, page_tokens, PAGE_TOKENS: tl.constexpr):
    """By token: its page, the number of that page in the list, and its place in the page."""
    if PAGE_TOKENS > 0:
        number = places // PAGE_TOKENS
        place = places % PAGE_TOKENS
    else:
        number = places // page_tokens
        place = places % page_tokens
    page = tl.load(pages + first_page + number, mask=is_read, other=0)
    return page.to(tl.int64), number, place


@triton.jit
def _load_tile(
    rows, offsets, is_read, channel_stride, DIM: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """[tokens, BLOCK] numbers; 0 for tokens that are not read, and for channels beyond DIM."""
    channels = tl.arange(0, BLOCK)
    if ALIGNED:
        pointers = rows + offsets[:, None] + channels[None, :]
        # Without it the compiler loads number by number and nothing ahead of its use.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, WIDTH))
    else:
        pointers = rows + offsets[:, None] + (channels * channel_stride)[None, :]
    if BLOCK == DIM:
        return tl.load(pointers, mask=is_read[:, None], other=0.0)
    return tl.load(pointers, mask=is_read[:, None] & (channels < DIM)[None, :], other=0.0)


@triton.jit
def _attend(
    queries, query_row_stride, query_head_stride, items, sources, pages, slot_rows,
    outputs, lses, score_scale, source,
    KEY_TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One item for one KV head, with the types of its keys and values."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    item = items + tl.program_id(0) * ITEM_COLUMNS
    begin = tl.load(item + ITEM_BEGIN)
    end = tl.load(item + ITEM_END)
    first_slot = tl.load(item + ITEM_FIRST_SLOT)
    key_pages = tl.load(item + ITEM_KEY_PAGES)
    key_first_row = tl.load(item + ITEM_KEY_FIRST_ROW)
    key_page_tokens = tl.load(item + ITEM_KEY_PAGE_TOKENS)
    value_pages = tl.load(item + ITEM_VALUE_PAGES)
    value_first_row = tl.load(item + ITEM_VALUE_FIRST_ROW)
    value_page_tokens = tl.load(item + ITEM_VALUE_PAGE_TOKENS)

    # The queries: heads of one row stand behind one another.
    index = tl.arange(0, BLOCK_M)
    row_index = index // GROUP
    query_head = head * GROUP + index % GROUP
    is_query = row_index < tl.load(item + ITEM_NUM_ROWS)
    slots = (first_slot + row_index).to(tl.int64)
    rows = tl.load(slot_rows + slots, mask=is_query, other=0).to(tl.int64)
    limits = tl.load(item + ITEM_LIMIT) + tl.load(item + ITEM_LIMIT_STEP) * row_index
    channels_k = tl.arange(0, BLOCK_K)
    query = tl.load(
        queries
        + (rows * query_row_stride + query_head * query_head_stride)[:, None]
        + channels_k[None, :],
        mask=is_query[:, None] & (channels_k < KEY_DIM)[None, :],
        other=0.0,
    )
    query = query.to(tl.float32 if UPCAST else KEY_TYPE)

    key_rows = _head_rows(sources, source, head, SOURCE_KEYS, KEY_TYPE)
    key_page_stride = _column(sources, source, SOURCE_KEYS + 1)
    key_token_stride = _column(sources, source, SOURCE_KEYS + 3)
    key_channel_stride = _column(sources, source, SOURCE_KEYS + 4)
    value_rows = _head_rows(sources, source, head, SOURCE_VALUES, VALUE_TYPE)
    value_page_stride = _column(sources, source, SOURCE_VALUES + 1)
    value_token_stride = _column(sources, source, SOURCE_VALUES + 3)
    value_channel_stride = _column(sources, source, SOURCE_VALUES + 4)
    if SCALES != UNSCALED:
        scales = _head_rows(sources, source, head, SOURCE_SCALES, tl.float32)
        scale_page_stride = _column(sources, source, SOURCE_SCALES + 1)
        scale_channel_stride = _column(sources, source, SOURCE_SCALES + 3)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    output = tl.full([BLOCK_M, BLOCK_V], 0.0, tl.float32)
    for start in range(begin, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_read = tokens < end
        page, _number, place = _pages_and_places(
            pages, key_pages, tokens + key_first_row, is_read, key_page_tokens, PAGE_TOKENS
        )
        key = _load_tile(
            key_rows, page * key_page_stride + place * key_token_stride, is_read,
            key_channel_stride, KEY_DIM, BLOCK_K, 128 // KEY_TYPE.primitive_bitwidth, ALIGNED,
        )  # fmt: skip
        page, number, place = _pages_and_places(
            pages, value_pages, tokens + value_first_row, is_read, value_page_tokens, PAGE_TOKENS
        )
        value = _load_tile(
            value_rows, page * value_page_stride + place * value_token_stride, is_read,
            value_channel_stride, VALUE_DIM, BLOCK_V, 128 // VALUE_TYPE.primitive_bitwidth, ALIGNED,
        )  # fmt: skip
        if UPCAST:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
        elif SCALES != UNSCALED:
            # Every e4m3 code is a number of either 16-bit type.
            value = value.to(KEY_TYPE)

        score = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        is_seen = is_read[None, :] & (tokens[None, :] < limits[:, None])
        score = tl.where(is_seen, score, float("-inf"))
        # Finite from the first tile on: each row sees the first key of its item.
        now_highest = tl.maximum(highest, tl.reduce(score, 1, tl.standard._elementwise_max))
        weight = tl.exp2(score - now_highest[:, None])
        shrink = tl.exp2(highest - now_highest)
        total = total * shrink + tl.reduce(weight, 1, tl.standard._sum_combine)
        if SCALES == BY_PAGE:
            scale = tl.load(scales + number * scale_page_stride, mask=is_read, other=0.0)
            weight = weight * scale[None, :]
        output = output * shrink[:, None]
        output = tl.dot(weight.to(value.dtype), value, output, input_precision="ieee")
        highest = now_highest

    channels = tl.arange(0, BLOCK_V)
    output = output / total[:, None]
    if SCALES == BY_CHANNEL:
        # Before merging: another segment has other scales.
        scale = tl.load(scales + channels * scale_channel_stride, mask=channels < VALUE_DIM)
        output = output * scale[None, :]
    places = slots * num_heads + query_head
    tl.store(
        outputs + (places * VALUE_DIM)[:, None] + channels[None, :],
        output,
        mask=is_query[:, None] & (channels < VALUE_DIM)[None, :],
    )
    # The exponentials are of base 2, and so was the scale of the scores; a partial is natural.
    tl.store(lses + places, (highest + tl.log2(total)) * 0.6931471805599453, mask=is_query)


@triton.jit
def partial_kernel(
    queries, query_row_stride, query_head_stride, items, sources, pages, slot_rows,
    outputs, lses, score_scale,
    KINDS: tl.constexpr, NUM_KINDS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, ALIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (i, h): item i for KV head h, into the item's slots.

    `queries` are [rows, heads, KEY_DIM]; `outputs` [slots, heads, VALUE_DIM] and `lses` [slots,
    heads], float32, natural. `pages` holds those of all sources behind one another. `score_scale`
    is the scores' factor times log2(e). KINDS: by kind the types of keys and values and how those
    are scaled. PAGE_TOKENS: of all sources; 0 = as each item says. ALIGNED: addresses and strides
    are multiples of 16 bytes, channels lie side by side. UPCAST: multiply in float32, because the
    interpreter multiplies the bits of a bfloat16.
    """
    source = tl.load(items + tl.program_id(0) * ITEM_COLUMNS + ITEM_SOURCE)
    kind = tl.load(sources + source * SOURCE_COLUMNS + SOURCE_KIND)
    for i in tl.static_range(NUM_KINDS):
        if kind == i:
            _attend(
                queries, query_row_stride, query_head_stride, items, sources, pages, slot_rows,
                outputs, lses, score_scale, source, KINDS[i][0], KINDS[i][1], KINDS[i][2],
                GROUP, KEY_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_V,
                PAGE_TOKENS, ALIGNED, UPCAST,
            )  # fmt: skip


@triton.jit
def merge_kernel(
    slot_outputs, slot_lses, row_slots, row_starts, outputs, lses,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Program (r, h): the slots of row r for head h as one; 0 and minus infinity without slots."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    begin = tl.load(row_starts + row)
    end = tl.load(row_starts + row + 1)
    channels = tl.arange(0, BLOCK_V)
    is_channel = channels < VALUE_DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    output = tl.full([BLOCK_V], 0.0, tl.float32)
    for start in range(begin, end, BLOCK_SLOTS):
        index = start + tl.arange(0, BLOCK_SLOTS)
        is_slot = index < end
        slot = tl.load(row_slots + index, mask=is_slot, other=0).to(tl.int64)
        lse = tl.load(slot_lses + slot * num_heads + head, mask=is_slot, other=float("-inf"))
        now_highest = tl.maximum(highest, tl.reduce(lse, 0, tl.standard._elementwise_max))
        weight = tl.exp(lse - now_highest)
        shrink = tl.exp(highest - now_highest)
        partial = tl.load(
            slot_outputs + ((slot * num_heads + head) * VALUE_DIM)[:, None] + channels[None, :],
            mask=is_slot[:, None] & is_channel[None, :],
            other=0.0,
        )
        total = total * shrink + tl.reduce(weight, 0, tl.standard._sum_combine)
        output = output * shrink + tl.reduce(partial * weight[:, None], 0, tl.standard._sum_combine)
        highest = now_highest
    place = (row * num_heads + head).to(tl.int64)
    # Not where it is more than 0: NaN stays NaN.
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(
        outputs + place * VALUE_DIM + channels,
        output / divisor,
        mask=is_channel,
    )
    tl.store(lses + place + tl.arange(0, 1), highest + tl.log(divisor))
