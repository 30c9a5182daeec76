// A part of compute.cpp, which includes it once for each instruction set: heads with a state, and gates.
//
// A state is changed row after row, however many there are: so a row's bits do not depend on how its sequence is cut.
// Sums over a state's rows are CHAINS sums side by side, joined first to last.
constexpr int CHAINS = most(1, 8 / PARTS);

// Where queries, keys and values of a row begin
struct Split { int queries, keys, values; };
inline Split split_of(const Operation& o) {
    const int each = o.kv_heads * o.distance_count, values = o.heads * o.size, first = o.column;
    return o.paired ? Split{first + values + each, first + values, first} : Split{first, first + each, first + 2 * each};
}

void prepare_recurrence(const Engine& e, const Operation& o, int row) {
    const Buffer &from = e.model.buffers[o.from], &gates = e.model.buffers[o.table];
    const Split split = split_of(o);
    temper(o, gates.data + (int64_t)row * gates.width + o.ahead);
    float* x = from.data + (int64_t)row * from.width;
    for (int which = 0; which < 2; which++)
        for (int h = 0; h < o.kv_heads; h++) {
            float* at = x + (which ? split.keys : split.queries) + h * o.distance_count;
            float factor = which ? 1.0f : o.scale;
            if (o.delta) {
                V squares = {};
                for (int i = 0; i < o.distance_count; i += VL) {
                    const V v = load_upto(at + i, o.distance_count - i);
                    squares = fuse(v, v, squares);
                }
                factor /= __builtin_sqrtf(total(squares) + o.epsilon);
            }
            for (int i = 0; factor != 1.0f && i < o.distance_count; i++) at[i] *= factor;
        }
}

// A key times a block of a state
inline void recall(const float* state, const float* key, int count, V* found) {
    V sums[CHAINS][PARTS] = {};
    int i = 0;
    for (; i + CHAINS <= count; i += CHAINS)
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 8
            for (int p = 0; p < PARTS; p++) sums[c][p] = fuse(all(key[i + c]), load(state + (i + c) * PANEL + p * VL), sums[c][p]);
    for (; i < count; i++)
        for (int p = 0; p < PARTS; p++) sums[0][p] = fuse(all(key[i]), load(state + i * PANEL + p * VL), sums[0][p]);
    for (int p = 0; p < PARTS; p++) {
        found[p] = sums[0][p];
        for (int c = 1; c < CHAINS; c++) found[p] += sums[c][p];
    }
}

// The next state, decay * state + key * update, and a query times it
inline void advance(float* state, float decay, const float* key, const V* update, const float* query, int count, V* found) {
    V sums[CHAINS][PARTS] = {};
    const auto next = [&](int i, V* to) {
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) {
            float* at = state + i * PANEL + p * VL;
            const V s = fuse(all(key[i]), update[p], load(at) * decay);
            store(at, s);
            to[p] = fuse(all(query[i]), s, to[p]);
        }
    };
    int i = 0;
    for (; i + CHAINS <= count; i += CHAINS)
#pragma GCC unroll 8
        for (int c = 0; c < CHAINS; c++) next(i + c, sums[c]);
    for (; i < count; i++) next(i, sums[0]);
    for (int p = 0; p < PARTS; p++) {
        found[p] = sums[0][p];
        for (int c = 1; c < CHAINS; c++) found[p] += sums[c][p];
    }
}

// A chunk's rows of PANEL columns of a head. Their part of the state stays in the caches, and pieces lie side by side: the
// processor fetches the next ones itself, and prefetches made a step of few rows slower.
void recur(const Engine& e, const Operation& o, int piece) {
    const int blocks = panels_of(o.size), own = piece % (o.heads * blocks), head = own / blocks, first = own % blocks * PANEL;
    const Chunk& c = e.sequences.of[piece / (o.heads * blocks)];
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to], &gates = e.model.buffers[o.table];
    const Split split = split_of(o);
    const int count = o.distance_count, left = o.size - first, shared = head / (o.heads / o.kv_heads) * count;
    float* state = c.state + o.place + (int64_t)own * count * PANEL;
    const float skip = o.query_gain ? o.query_gain[head] : 0.0f;
    int save = c.saves;
    for (int row = c.row; row < c.row + c.rows; row++) {
        const float *x = from.data + (int64_t)row * from.width, *gate = gates.data + (int64_t)row * gates.width + o.ahead;
        const float *query = x + split.queries + shared, *key = x + split.keys + shared;
        const float strength = gate[head], decay = gate[o.heads + head];
        V values[PARTS], update[PARTS], found[PARTS] = {};
        for (int p = 0; p < PARTS; p++) values[p] = p * VL < left ? load_upto(x + split.values + head * o.size + first + p * VL, left - p * VL) : (V){};
        if (o.delta) recall(state, key, count, found);
        for (int p = 0; p < PARTS; p++) update[p] = strength * (values[p] - decay * found[p]);
        advance(state, decay, key, update, query, count, found);
        float* y = to.data + (int64_t)row * to.width + head * o.size + first;
        for (int p = 0; p * VL < least(PANEL, left); p++)
            store_upto(y + p * VL, o.query_gain ? fuse(all(skip), values[p], found[p]) : found[p], left - p * VL);
        for (; save < c.saves + c.save_count && e.step.saved_rows[save] == row; save++)
            __builtin_memcpy(e.step.saved[save] + (state - c.state), state, (size_t)count * PANEL * 4);
    }
}

// Numbers of a row by gates, and the norm of each head
void gate(const Engine& e, const Operation& o, int row) {
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to], &gates = e.model.buffers[o.table];
    for (int h = 0; h < o.heads; h++) {
        const float *x = from.data + (int64_t)row * from.width + o.column + h * o.size;
        const float* own = gates.data + (int64_t)row * gates.width + o.ahead + h * o.distance_count;
        float *y = to.data + (int64_t)row * to.width + h * o.size, factor = 1.0f;
        const float* gain = o.norm == NO_NORM ? nullptr : o.gain + (o.together ? h * o.size : 0);
        const auto opened = [&](int i) {
            const V g = (o.distance_count == 1 ? all(own[0]) : load_upto(own + i, o.size - i)) * o.scale;
            return o.ending == ACTIVATED ? activated(g, o.activation) : g;
        };
        if (gain) {
            V squares = {};
            for (int i = 0; i < o.size; i += VL) {
                const V v = load_upto(x + i, o.size - i), normed = o.paired ? v : v * opened(i);
                squares = fuse(normed, normed, squares);
            }
            factor = 1.0f / __builtin_sqrtf(total(squares) / o.size + o.epsilon);
        }
        for (int i = 0; i < o.size; i += VL) {
            const int left = o.size - i;
            const V v = load_upto(x + i, left) * opened(i) * factor;
            store_upto(y + i, gain ? v * load_upto(gain + i, left) : v, left);
        }
    }
}
