// A part of compute.cpp, which includes it once for each instruction set: attention and convolutions over a sequence.
// Those that rows of ATTEND_ALL see
inline const Chunks& chunks_of(const Engine& e, const Operation& o) { return o.by_chunk ? e.chunks : e.sequences; }

// The keys of a row of all states and chunks, and behind them its values
inline const float* keys_at(const Engine& e, const Operation& o, int owned) {
    const Chunk& c = e.sequences.of[e.sequences.owners[owned]];
    const Buffer& from = e.model.buffers[o.from];
    const int row = owned - c.start - c.kept, heads = o.heads * o.size;  // before 0: a row of the state
    if (row < 0) return c.state + o.place + (int64_t)(row + c.kept) * 2 * heads;
    return from.data + (int64_t)(c.row + row) * from.width + heads;
}

// Whether a sequence's or chunk's keys and values are quantized, and so are the queries and weights that they are multiplied with. That
// depends on its rows alone, and so do their bits; one that has a state is cut anywhere.
inline bool is_quantized(const Engine& e, const Operation& o, const Chunk& c) {
    return o.quantized && !e.model.state && o.size >= GROUP && c.rows >= LONG;
}

// Where these keys lie, [rows / 32][groups of the size], and these values, [rows / 32] from number `at` on, all groups of
// PANEL outputs as in a matrix: in place of the first panel of the step's rows that has the chunk's alone, and those
// behind it, which are larger.
inline uint8_t* keys_of(const Engine& e, const Operation& o, const Chunk& c, int head) {
    const int64_t before = (int64_t)head * panels_of(e.owned) + panels_of(c.start);
    return (uint8_t*)(e.keys + before * o.size * PANEL);
}
inline uint8_t* values_of(const Engine& e, const Operation& o, const Chunk& c, int head, int at) {
    const int64_t before = ((int64_t)head * panels_of(o.size) + at / PANEL) * e.owned + panels_of(c.start) * PANEL;
    return (uint8_t*)(e.values + before * PANEL);
}

// The keys and values of a head and of PANEL rows of a long chunk, from row `start` of it on; those of no row are zero.
void gather_quantized(Engine& e, const Operation& o, const Chunk& c, int head, int start, uint8_t* room) {
    const int count = least(PANEL, c.rows - start), groups = groups_of(o.size), first = c.start + start;
    uint8_t* keys = keys_of(e, o, c, head) + (size_t)(start / PANEL) * groups * group_bytes(Q8_32);
    for (int i = 0; i < PANEL; i++) {
        if (i < count) quantize(keys_at(e, o, first + i) + head * o.size, o.size, room);
        else __builtin_memset(room, 0, quantized_bytes(o.size));
        for (int g = 0; g < groups; g++) {
            uint8_t* to = keys + g * group_bytes(Q8_32);
            ((float*)to)[i] = ((const float*)(room + (size_t)groups * GROUP))[g];
            for (int k = 0; k < GROUP; k += 4) __builtin_memcpy(to + (4 + k) * PANEL + 4 * i, room + g * GROUP + k, 4);
        }
    }
    for (int at = 0; at < o.size; at += VL) {
        uint8_t* to = values_of(e, o, c, head, at) + (size_t)(start / PANEL) * group_bytes(Q8_32) + at % PANEL * 4;
        V values[GROUP];
        VI top = {};
        for (int i = 0; i < GROUP; i++) {
            values[i] = i < count ? load_upto(keys_at(e, o, first + i) + (o.heads + head) * o.size + at, o.size - at) : (V){};
            const VI size = (VI)values[i] & 0x7fffffff;
            top = size > top ? size : top;
        }
        const V largest = (V)top, inverse = largest > 1e-30f ? 127.0f / largest : (V){};
        store((float*)to, largest / 127.0f + (largest - largest));
        for (int k = 0; k < GROUP; k += 4) {
            VI four = {};
            for (int i = 0; i < 4; i++) four |= (whole_of(values[k + i] * inverse) & 255) << 8 * i;
            __builtin_memcpy(to + (4 + k) * PANEL, &four, sizeof four);
        }
    }
}

// The keys and values of a head and PANEL rows, into panels; those of no row are zero.
void gather(Engine& e, const Operation& o, int thread, int piece) {
    const int rows = e.owned, panels = panels_of(rows), head = piece / panels, first = piece % panels * PANEL;
    const Chunks& chunks = chunks_of(e, o);
    const Chunk& c = chunks.of[chunks.owners[first]];
    const int end = c.start + c.rows;
    if (is_quantized(e, o, c) && first >= c.start && first + PANEL <= end) {
        const int start = first - panels_of(c.start) * PANEL;
        for (int at = start; at == start || (first + 2 * PANEL > end && at < c.rows); at += PANEL)  // the last one, the rest
            gather_quantized(e, o, c, head, at, (uint8_t*)e.own[thread]);
        return;
    }
    float* keys = e.keys + ((int64_t)head * panels + piece % panels) * o.size * PANEL;
    for (int i = 0; i < PANEL; i++) {
        const float* key = first + i < rows ? keys_at(e, o, first + i) + head * o.size : nullptr;
        for (int d = 0; d < o.size; d++) keys[d * PANEL + i] = key ? key[d] : 0.0f;
    }
    for (int at = 0; at < o.size; at += PANEL) {
        float* values = e.values + (((int64_t)head * panels_of(o.size) + at / PANEL) * rows + first) * PANEL;
        for (int i = 0; i < least(PANEL, rows - first); i++) {
            const float* value = keys_at(e, o, first + i) + (o.heads + head) * o.size + at;
            for (int d = 0; d < PANEL; d++) values[i * PANEL + d] = at + d < o.size ? value[d] : 0.0f;
        }
    }
}

// The first row that a chunk's row sees, and the one behind the last, counted from the chunk's first; before 0: the state's
inline int low_of(const Engine& e, const Operation& o, const Chunk& c, int row) {
    return o.window ? most(-c.kept, row - row % e.model.block - o.window + 1) : -c.kept;
}
inline int high_of(const Engine& e, const Operation& o, const Chunk& c, int row) {
    return o.window ? least(c.rows, row - row % e.model.block + e.model.block + o.ahead) : c.rows;
}

inline int place_at(const Operation& o, int away) {
    const int far = o.distance_count / 2;
    return o.places[most(-far, least(far, away)) + far];
}

// How far the nearest key before the others is whose place is `place` or behind it
int nearest_at(const Operation& o, int place) {
    int from = 0, to = o.distance_count;
    while (from < to) {
        const int middle = from + (to - from) / 2;
        if (o.places[middle] < place) from = middle + 1;
        else to = middle;
    }
    if (from == 0) return -(1 << 30);  // all that are farther have that place, too
    return from == o.distance_count ? 1 << 30 : from - o.distance_count / 2;
}

// Adds to a batch's scores what places give: products of its queries with keys of places, and of keys with queries of
// places. The scores are of `count` keys from a chunk's row `low` on.
void add_places(const Engine& e, const Operation& o, const Block& b, int head, int low, int count, float* scores, int width) {
    const Buffer& from = e.model.buffers[o.from];
    const int start_row = chunks_of(e, o).of[b.table].row, away = low - (b.row - start_row);  // from the first row to the first key
    for (int of_keys = 0; of_keys < 2; of_keys++) {
        const Matrix* m = of_keys ? o.place_queries : o.place_keys;
        if (!m) continue;
        const float* x = from.data + (int64_t)(of_keys ? start_row + low : b.row) * from.width + (of_keys ? o.heads + head : head) * o.size;
        const int before = head * (m->panels / o.heads), rows = of_keys ? count : b.rows, others = of_keys ? b.rows : count;
        for (int start = 0; start < rows; start += BATCH) {  // some keys have few places
            const int taken = least(BATCH, rows - start), nearest = away - b.rows + 1 + (of_keys ? start : 0);
            const int low_panel = place_at(o, nearest) / PANEL;
            const int high_panel = place_at(o, of_keys ? away + start + taken - 1 : away + count - 1) / PANEL;
            multiply<Float32>(*m, before + low_panel, high_panel - low_panel + 1, 0, x + (int64_t)start * from.width, from.width, taken, [&](int p, int i, float* found, float*) {
                const int row = start + i, place = (p - before) * PANEL, first = of_keys ? away + row - others + 1 : away - row;
                const int end = least(first + others, nearest_at(o, place + PANEL));
                for (int far = most(first, nearest_at(o, place)); far < end; far++)
                    scores[of_keys ? (away + row - far) * width + row : row * width + far - first] += found[place_at(o, far) - place] * o.scale;
            });
        }
    }
}

// A head and a batch of a chunk's rows: their scores of the rows they see, e^(score - largest) of these, and the values
// by them. Keys of the whole step lie in panels; scores lie by their place in the sequence or chunk, so that others
// change no sum.
void attend_all(Engine& e, const Operation& o, int thread, int piece) {
    const Chunks& chunks = chunks_of(e, o);
    const Block& b = chunks.batches[piece % chunks.batch_count];
    const Chunk& c = chunks.of[b.table];
    const bool quantized = is_quantized(e, o, c);
    const int head = piece / chunks.batch_count, rows = e.owned, panels = panels_of(rows), own_row = b.row - c.row;
    const int low = quantized ? low_of(e, o, c, own_row) / GROUP * GROUP : low_of(e, o, c, own_row), at_low = c.start + c.kept + low;
    const int count = high_of(e, o, c, own_row + b.rows - 1) - low, width = panels_of(count) * PANEL, far = o.distance_count / 2;
    const int base = quantized ? low : at_low, first = base / PANEL;  // of panels, where a long chunk has its own
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const float *keys = e.keys + (int64_t)head * panels * o.size * PANEL, *values = e.values + (int64_t)head * panels_of(o.size) * rows * PANEL;
    // quantized queries and weights; the latter take the place of the scores before them
    const size_t of_query = quantized_bytes(o.size), of_weights = quantized_bytes(width);
    uint8_t *small_queries = (uint8_t*)e.own[thread], *small_weights = small_queries + quantized * BATCH * of_query;
    float *scores = (float*)(small_weights + quantized * of_weights), inverse[BATCH];
    const float* queries = from.data + (int64_t)b.row * from.width + head * o.size;
    const auto keep = [&](int p, int row, float* found, float*) {
        float* own = scores + row * width;
        const int start = p * PANEL - base;
        if (start >= 0 && start + PANEL <= count)
            for (int i = 0; i < PANEL; i += VL) store(own + start + i, load(found + i) * o.scale);
        else
            for (int i = most(0, -start); i < least(PANEL, count - start); i++) own[start + i] = found[i] * o.scale;
    };
    const int seen = panels_of(base + count) - first;
    if (quantized) {
        for (int r = 0; r < b.rows; r++) quantize(queries + (int64_t)r * from.width, o.size, small_queries + r * of_query);
        const Matrix by_keys{INT8, o.size, c.rows, panels_of(c.rows), keys_of(e, o, c, head), nullptr};
        multiply8(by_keys, first, seen, 0, small_queries, of_query, b.rows, keep);
    } else {
        const Matrix by_keys{FLOAT32, o.size, rows, panels, (const uint8_t*)keys, nullptr};
        multiply<Float32>(by_keys, first, seen, 0, queries, from.width, b.rows, keep);
    }
    if (o.places) add_places(e, o, b, head, low, count, scores, width);
    for (int r = 0; r < b.rows; r++) {
        float* own = scores + r * width;
        const int row = own_row + r, behind = low - row;  // from the row to the first key
        const int from_key = low_of(e, o, c, row) - low, to_key = high_of(e, o, c, row) - low;
        for (int i = 0; o.distances && i < count; i++)
            own[i] += o.distances[head * o.distance_count + most(-far, least(far, behind + i)) + far];
        for (int i = 0; i < from_key; i++) own[i] = -INFINITE;
        for (int i = to_key; i < width; i++) own[i] = -INFINITE;
        V top = all(-INFINITE), sum = {};
        for (int i = 0; i < width; i += VL) {
            const V s = load(own + i);
            top = s > top ? s : top;
        }
        float largest = top[0];
        for (int i = 1; i < VL; i++) largest = top[i] > largest ? top[i] : largest;
        for (int i = 0; i < width; i += VL) {
            const V s = load(own + i), weight = s == -INFINITE ? (V){} : exponential(s - largest);
            store(own + i, weight);
            sum += weight;
        }
        inverse[r] = 1.0f / total(sum);
        if (quantized) quantize(own, width, small_weights + r * of_weights);
    }
    for (int at = 0; at < o.size; at += PANEL) {
        const auto finish = [&](int, int row, float* found, float*) {
            float* target = to.data + (int64_t)(b.row + row) * to.width + head * o.size + at;
            const int left = least(PANEL, o.size - at);
            for (int i = 0; i < left; i += VL) store_upto(target + i, load(found + i) * inverse[row], left - i);
        };
        if (quantized) {
            const Matrix by_values{INT8, width, PANEL, 1, values_of(e, o, c, head, at) + (size_t)first * group_bytes(Q8_32), nullptr};
            multiply8(by_values, 0, 1, 0, small_weights, of_weights, b.rows, finish);
            continue;
        }
        const float* own = values + ((int64_t)at / PANEL * rows + at_low) * PANEL;
        const Matrix by_values{FLOAT32, count, PANEL, 1, (const uint8_t*)own, nullptr};
        multiply<Float32>(by_values, 0, 1, 0, scores, width, b.rows, finish);
    }
}

// A batch of a chunk's rows, and a panel of their numbers: by those of the rows around, first to last
void convolve(Engine& e, const Operation& o, int piece) {
    const Chunks& sequences = e.sequences;
    const Block& b = sequences.batches[piece % sequences.batch_count];
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const Chunk& chunk = sequences.of[b.table];
    const int width = o.size ? o.size : from.width, end = chunk.row + chunk.rows, panel = piece / sequences.batch_count * PANEL;
    const int begin = chunk.row - least(chunk.kept, o.window);
    for (int c = panel; c < least(width, panel + PANEL); c += VL)
        for (int row = b.row; row < b.row + b.rows; row++) {
            V sum = load(o.shift + c);
            const int first = row - o.window;
            for (int at = most(first, begin); at < least(first + o.distance_count, end); at++) {
                const float* x = at < chunk.row ? chunk.state + o.place + (int64_t)(at - begin) * width : from.data + (int64_t)at * from.width + o.column;
                sum = fuse(load(x + c), load(o.gain + (at - first) * width + c), sum);
            }
            store(to.data + (int64_t)row * to.width + c, o.ending == ACTIVATED ? activated(sum, o.activation) : sum);
        }
}

// The last rows of a chunk's state and of the chunk, into its state
void keep(const Engine& e, const Operation& o, int chunk) {
    const Chunk& c = e.sequences.of[chunk];
    const Buffer& from = e.model.buffers[o.from];
    if (!c.state) return;
    const float* state = c.state + o.place;
    const auto write = [&](float* to, int rows) {  // as it is behind so many rows
        const int before = least(c.kept, o.window), fresh = least(rows, o.window), stay = least(before, o.window - fresh);
        __builtin_memmove(to, state + (int64_t)(before - stay) * o.size, (size_t)stay * o.size * 4);
        for (int i = 0; i < fresh; i++)
            __builtin_memcpy(to + (int64_t)(stay + i) * o.size, from.data + (int64_t)(c.row + rows - fresh + i) * from.width + o.column, (size_t)o.size * 4);
    };
    for (int i = c.saves; i < c.saves + c.save_count; i++) write(e.step.saved[i] + o.place, e.step.saved_rows[i] + 1 - c.row);
    write(c.state + o.place, c.rows);
}

// Numbers of the state of a row's chunk; and a layer's next state, by its gates: input, forget, cell and output
inline float* state_of(const Engine& e, const Operation& o, int row) {
    return e.sequences.of[e.sequences.owners[o.wanted == 1 ? e.step.wanted[row] : row]].state + o.place;
}
void lstm(const Engine& e, const Operation& o, int row) {
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const float* gates = from.data + (int64_t)row * from.width;
    float *hidden = state_of(e, o, row), *cell = hidden + o.size;
    for (int i = 0; i < o.size; i += VL) {
        const int left = o.size - i;
        const auto gate = [&](int which) { return load_upto(gates + which * o.size + i, left); };
        const V c = activated(gate(1), SIGMOID) * load_upto(cell + i, left) + activated(gate(0), SIGMOID) * tanh_of(gate(2));
        const V h = activated(gate(3), SIGMOID) * tanh_of(c);
        store_upto(cell + i, c, left);
        store_upto(hidden + i, h, left);
        store_upto(to.data + (int64_t)row * to.width + i, h, left);
    }
}
