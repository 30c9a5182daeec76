// What a step computes, compiled once for each instruction set (LEVEL). Functions here are static and use builtins
// alone: one that the linker shares between the copies might be the one of another instruction set.
//
// Order of sums: a product is one sum over each SUM inputs, and over these, first to last; a score is one vector of
// sums over a head, joined as a tree; attention is a sum over the positions of each CHUNK; the chunks of a SPAN are
// joined first to last, and so are the spans. Tiles, threads, blocks of rows and pages change none of it. Products and
// sums are fused where `fuse` is, and nowhere else (-ffp-contract=off).
#include "engine.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace LEVEL {
namespace {

#include "numbers.h"
#include "products.h"
#include "attention.h"
#include "whole.h"
#include "tokens.h"
#include "recurrence.h"

// ---------------------------------------------------------------- norms

void normalize(const Operation& o, const float* x, float* y, int width) {
    V sum = {}, squares = {};
    float mean = 0.0f;
    if (o.norm == LAYER_NORM) {
        for (int i = 0; i < width; i += VL) sum += load(x + i);
        mean = total(sum) / width;
    }
    for (int i = 0; i < width; i += VL) {
        const V v = load(x + i) - mean;
        squares = fuse(v, v, squares);
    }
    const float factor = 1.0f / __builtin_sqrtf(total(squares) / width + o.epsilon);
    for (int i = 0; i < width; i += VL) {
        const V v = (load(x + i) - mean) * factor * load(o.gain + i);
        const V shifted = o.shift ? v + load(o.shift + i) : v;
        store(y + i, o.kind == NORM && o.ending == ACTIVATED ? activated(shifted, o.activation) : shifted);
    }
}

inline const float* row_of(const Engine& e, const Operation& o, int row) {
    const Buffer& b = e.model.buffers[o.from];
    return b.data + (int64_t)(o.wanted == 1 ? e.step.wanted[row] : row) * b.width;
}

inline int rows_of(const Engine& e, const Operation& o) { return o.wanted ? e.step.wanted_count : e.step.rows; }

// ---------------------------------------------------------------- the threads' parts

// Calls `work(first, count)` for pieces, those of one's own part first, then of those of the others. The step is read
// in `work` alone: a thread that comes late gets no piece.
template <class Work>
inline void share(Engine& e, Phase& phase, int thread, uint32_t round, Work work) {
    const int threads = e.model.threads;
    const int total = __atomic_load_n(&phase.total, __ATOMIC_ACQUIRE), piece = __atomic_load_n(&phase.piece, __ATOMIC_ACQUIRE);
    for (int t = 0; t < threads; t++) {
        const int whose = (thread + t) % threads;
        const int begin = (int)((int64_t)total * whose / threads), size = (int)((int64_t)total * (whose + 1) / threads) - begin;
        for (int at; (at = take(phase.next[whose], piece, size, round)) >= 0;) {
            const int count = least(piece, size - at);
            work(begin + at, count);
            finish(phase, count);
        }
    }
}

// ---------------------------------------------------------------- a linear layer

inline bool is_gated(const Operation& o) { return o.ending == GATED || o.ending == GATED_BY; }

// Outputs of `panel`, to where those of `first` begin in a row; `width` of them are left there. The panel of what gates
// are multiplied with is `apart` from theirs. `more`, if there is some, is added to all of them.
void finish_panel(const Operation& o, float* to, int width, int first, int panel, int apart, float* values, float* gated, const float* more = nullptr) {
    const Matrix& m = *o.matrix;
    float* at = to + (panel - first) * PANEL;
    const int count = least(PANEL, width - (panel - first) * PANEL);
    for (int i = 0; i < PANEL; i += VL) {
        V v = load(values + i);
        if (m.bias) v += load(m.bias + panel * PANEL + i);
        if (more) v += load(more + panel * PANEL + i);
        if (is_gated(o)) {
            V value = load(gated + i);
            if (m.bias) value += load(m.bias + (panel + apart) * PANEL + i);
            if (more) value += load(more + (panel + apart) * PANEL + i);
            const float factor = o.soft_cap == 0.0f ? 1.0f : o.soft_cap;
            if (o.ending == GATED) v *= factor;
            else value *= factor;
            if (o.ending == GATED && o.cap > 0.0f) {
                const V most = all(o.cap), least = all(-o.cap);
                v = v > most ? most : v;
                value = value > most ? most : value;
                value = (value < least ? least : value) + 1.0f;
            }
            v = o.ending == GATED ? activated(v, o.activation) * value : v * activated(value, o.activation);
        }
        if (o.ending == ACTIVATED) v = activated(v, o.activation);
        if (o.scale != 0.0f && o.scale != 1.0f) v *= o.scale;
        if (o.ending == CAPPED) v = o.cap * tanh_of(v / o.cap);
        if (o.ending == ADD || o.ending == ADD_ACTIVATED) v += load_upto(at + i, count - i);
        if (o.ending == ADD_ACTIVATED) v = activated(v, o.activation);
        store_upto(at + i, v, count - i);
    }
}

inline bool is_prepared(const Operation& o) { return o.norm != NO_NORM || is_narrowed(o.matrix->format); }
inline int pieces_of(const Operation& o) {  // of one expert or adapter
    const int panels = o.kind == EXPERTS || o.kind == ADAPT ? o.matrix->panels / o.kv_heads : o.matrix->panels;
    return is_gated(o) ? panels / 2 : panels;
}
inline int own_rows(const Operation& o) { return is_narrowed(o.matrix->format) ? OWN_NARROWED : OWN_ROWS; }

// The bytes of a row that is prepared for a product
inline size_t prepared_bytes(const Matrix& m) {
    if (m.format == PAIRS) return pairs_bytes(m.inputs);
    return is_int8(m.format) ? planes_of(m) * quantized_bytes(m.inputs) : (size_t)m.inputs * 4;
}

// How far apart the rows are that a product reads, in bytes
inline size_t stride_of(const Engine& e, const Operation& o) {
    return is_prepared(o) ? prepared_bytes(*o.matrix) : (size_t)e.model.buffers[o.from].width * 4;
}

// A row as a product reads it: normalized, made smaller, or both by way of `room`; or as it is
void prepare_row(const Operation& o, const float* x, float* room, uint8_t* to) {
    if (o.norm != NO_NORM) {
        float* normed = is_narrowed(o.matrix->format) ? room : (float*)to;
        normalize(o, x, normed, o.matrix->inputs);
        x = normed;
    }
    if (is_int8(o.matrix->format)) quantize(x, o.matrix->inputs, to, planes_of(*o.matrix), o.matrix->order);
    else if (o.matrix->format == PAIRS) pair(x, o.matrix->inputs, to);
    else if (o.norm == NO_NORM) __builtin_memcpy(to, x, (size_t)o.matrix->inputs * 4);
}

template <class Each, class Ahead = Nothing>
inline void multiply_any(const Matrix& m, int panel, int count, int apart, const uint8_t* x, size_t stride, int rows, Each each, Ahead ahead = {}) {
    if (is_int8(m.format)) return multiply8(m, panel, count, apart, x, stride, rows, each, ahead);
    const float* floats = (const float*)x;
    const int64_t width = stride / 4;
    const Matrix pairs{m.format, pairs_of(m.inputs), m.outputs, m.panels, m.weights, m.bias};
    switch (m.format) {
        case PAIRS: return multiply<Pairs>(pairs, panel, count, apart, floats, width, rows, each, ahead);
        case FLOAT32: return multiply<Float32>(m, panel, count, apart, floats, width, rows, each, ahead);
        case FLOAT16: return multiply<Float16>(m, panel, count, apart, floats, width, rows, each, ahead);
        default: return multiply<Bfloat16>(m, panel, count, apart, floats, width, rows, each, ahead);
    }
}

void linear(Engine& e, const Operation& o, Phase& phase, int thread, uint32_t round) {
    const Matrix& m = *o.matrix;
    uint8_t* own = (uint8_t*)e.own[thread] + (is_narrowed(m.format) ? ((size_t)m.inputs * 4 + 63) / 64 * 64 : 0);
    bool prepared = false;
    share(e, phase, thread, round, [&](int piece, int count) {
        const int all_rows = rows_of(e, o), panels = pieces_of(o);
        const int panel = piece % panels, from = piece / panels * BAND, rows = least(BAND, all_rows - from);
        const size_t stride = stride_of(e, o);
        const uint8_t* x = (const uint8_t*)e.model.buffers[o.from].data;
        if (is_prepared(o)) {
            x = all_rows > own_rows(o) ? e.ready : own;
            for (int row = 0; row < rows && x == own && !prepared; row++)
                prepare_row(o, row_of(e, o, row), e.own[thread], own + row * stride);
            prepared = true;
        }
        x += from * stride;
        const Buffer &to = e.model.buffers[o.to], &added = e.model.buffers[o.table];
        const int apart = is_gated(o) ? m.panels / 2 : 0;
        multiply_any(m, panel, count, apart, x, stride, rows, [&](int p, int row, float* values, float* gated) {
            const bool more = o.delta && e.adapted.rows && e.adapted.asked[from + row] >= 0;
            finish_panel(o, to.data + (int64_t)(from + row) * to.width, to.width, 0, p, apart, values, gated,
                         more ? added.data + (int64_t)(from + row) * added.width : nullptr);
        }, [&](int p, int row) {
            const float* at = to.data + (int64_t)(from + row) * to.width + p * PANEL;
            for (int i = 0; i < PANEL; i += 64 / 4) __builtin_prefetch(at + i, 1, 3);
        });
    });
}

// ---------------------------------------------------------------- experts

// What one expert or adapter reads of a row, to its place in the order
void prepare_expert(const Engine& e, const Operation& o, const Groups& groups, int thread, int at) {
    const int row = groups.order[at] / o.heads, rank = groups.order[at] % o.heads;
    const size_t stride = prepared_bytes(*o.matrix);
    prepare_row(o, row_of(e, o, row) + (int64_t)rank * o.distance_count, e.own[thread], e.ready + at * stride);
}

void experts(Engine& e, const Operation& o, Phase& phase, int thread, uint32_t round) {
    const Matrix& m = *o.matrix;
    const size_t stride = prepared_bytes(m);
    const int panels = pieces_of(o), apart = is_gated(o) ? panels : 0;
    share(e, phase, thread, round, [&](int piece, int count) {
        for (int taken; count && piece / panels < e.experts.count; piece += taken, count -= taken) {
            const Block& one = e.experts.parts[piece / panels];
            const int first = one.table * (panels + apart), panel = piece % panels;
            taken = least(count, panels - panel);
            multiply_any(m, first + panel, taken, apart, e.ready + one.row * stride, stride, one.rows,
                         [&](int p, int row, float* values, float* gated) {
                const int at = e.experts.order[one.row + row];
                const Buffer& to = e.model.buffers[o.to];
                float* own = to.data + (int64_t)(at / o.heads) * to.width + (int64_t)(at % o.heads) * o.size;
                finish_panel(o, own, o.size, first, p, apart, values, gated);
            });
        }
    });
}

// ---------------------------------------------------------------- adapters

void adapt(Engine& e, const Operation& o, Phase& phase, int thread, uint32_t round) {
    const Matrix& m = *o.matrix;
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    const int panels = pieces_of(o);
    const size_t stride = o.places ? (size_t)from.width * 4 : prepared_bytes(m);
    const uint8_t* inputs = o.places ? (const uint8_t*)from.data : e.ready;
    share(e, phase, thread, round, [&](int piece, int count) {
        for (int taken; count; piece += taken, count -= taken) {
            const Block& one = e.adapted.parts[piece / panels];
            const int first = one.table * panels, panel = piece % panels, place = o.places ? o.places[panel] : 0, most = least(count, panels - panel);
            for (taken = 1; taken < most && (!o.places || o.places[panel + taken] == place);) taken++;
            multiply_any(m, first + panel, taken, 0, inputs + one.row * stride + (size_t)place * 4, stride, one.rows,
                         [&](int p, int row, float* values, float* gated) {
                const int at = one.row + row;
                float* own = to.data + (int64_t)(o.places ? e.adapted.order[at] : at) * to.width;
                finish_panel(o, own, o.size, first, p, 0, values, gated);
            });
        }
    });
}

// ---------------------------------------------------------------- sums and copies

void mix(const Engine& e, const Operation& o, int row) {
    const Buffer &weights = e.model.buffers[o.table], &to = e.model.buffers[o.to];
    const float *x = row_of(e, o, row), *w = weights.data + (int64_t)row * weights.width;
    float* y = to.data + (int64_t)row * to.width;
    for (int i = 0; i < o.size; i += VL) {
        const int count = o.size - i;
        V sum = {};
        for (int rank = 0; rank < o.heads; rank++) sum = fuse(load_upto(x + (int64_t)rank * o.size + i, count), all(w[rank]), sum);
        sum *= o.scale;
        store_upto(y + i, o.ending == ADD ? load_upto(y + i, count) + sum : sum, count);
    }
}

void copy(const Engine& e, const Operation& o, int row) {
    const float* x = row_of(e, o, row) + o.column;
    float* y = e.model.buffers[o.to].data + (int64_t)row * e.model.buffers[o.to].width + o.place;
    for (int head = 0; head < o.heads; head++, x += o.window, y += o.ahead)
        for (int i = 0; i < o.size; i += VL) {
            const int count = o.size - i;
            const V scaled = load_upto(x + i, count) * o.scale, there = o.ending == STORE ? scaled : load_upto(y + i, count);
            store_upto(y + i, o.ending == ADD ? there + scaled : o.ending == GATED ? there * scaled : scaled, count);
        }
}

// ---------------------------------------------------------------- phases

Share share_of(const Engine& e, int phase) {
    if (phase == 0) return {e.step.copy_count * e.model.layers, 1};
    const int index = phase - 1;
    if (index == 2 * e.model.count) return {e.step.draws && e.step.part == WHOLE ? e.step.wanted_count : 0, 1};
    const Operation& o = e.model.operations[index / 2];
    const int rows = rows_of(e, o);
    const bool head = index / 2 == e.model.count - 1;
    if (head ? e.step.part == HEADLESS : e.step.part == HEAD) return {0, 1};
    if (o.kind == ROUTE) return {index % 2 ? 1 : rows, 1};
    if (index % 2 == 0 && o.kind == RECUR) return {rows, BLOCK};
    if (index % 2 == 0 && o.kind == EXPERTS) return {rows * o.heads, 2};
    if (index % 2 == 0 && o.kind == ADAPT) return {o.places ? 0 : e.adapted.rows, 2};
    if (index % 2 == 0 && o.kind == ATTEND_ALL) return {o.heads * panels_of(e.owned), 4};
    if (index % 2 == 0) return {o.kind == LINEAR && is_prepared(o) && rows > own_rows(o) ? rows : 0, BLOCK};
    if (o.kind == CONVOLVE) return {e.sequences.batch_count * panels_of(o.size ? o.size : e.model.buffers[o.from].width), rows > BLOCK ? 1 : 8};
    if (o.kind == RECUR) return {e.sequences.count * o.heads * panels_of(o.size), rows > BLOCK ? 1 : 4};
    if (o.kind == ATTEND_ALL) return {o.heads * chunks_of(e, o).batch_count, chunks_of(e, o).batch_count > BLOCK ? 4 : 1};
    if (o.kind == TURN) return {e.block_count, 1};
    if (o.kind == ATTEND) return {attention_pieces(e, o), 1};
    if (o.kind == CROSS) return {e.slot_count * o.heads, 1};
    if (o.kind == LOOKUP && (!e.step.tokens || (e.step.fed && !o.to))) return {0, 1};
    if (o.kind == KEEP) return {e.sequences.count, 1};
    if (o.kind != LINEAR && o.kind != EXPERTS && o.kind != ADAPT) return {rows, BLOCK};
    // of few rows some 64 kB of weights; of many, one panel is much work
    const size_t bytes = panel_bytes(*o.matrix);
    const int some = most(2, (int)(65536 / bytes) & ~1);
    if (o.kind == EXPERTS) {
        const int groups = least(o.kv_heads, rows * o.heads);  // there may be fewer
        return {groups * pieces_of(o), rows * o.heads > groups * BLOCK ? 1 : some};
    }
    if (o.kind == ADAPT) return {e.adapted.count * pieces_of(o), e.adapted.rows > e.adapted.count * BLOCK ? 1 : some};
    const int bands = (rows + BAND - 1) / BAND;  // one after the other
    return {bands * pieces_of(o), rows > BLOCK ? 1 : some};
}

void run(Engine& e, int number, int thread, uint32_t round) {
    const int index = number - 1;
    Phase& phase = e.phases[number];
    if (number == 0 || index == 2 * e.model.count)
        return share(e, phase, thread, round, [&](int first, int count) {
            for (int at = first; at < first + count; at++) number ? choose(e, thread, at) : copy_page(e, at);
        });
    const Operation& o = e.model.operations[index / 2];
    if (o.kind == LINEAR && index % 2) return linear(e, o, phase, thread, round);
    if (o.kind == EXPERTS && index % 2) return experts(e, o, phase, thread, round);
    if (o.kind == ADAPT && index % 2) return adapt(e, o, phase, thread, round);
    const Buffer &from = e.model.buffers[o.from], &to = e.model.buffers[o.to];
    share(e, phase, thread, round, [&](int first, int count) {
        for (int at = first; at < first + count; at++) {
            if (o.kind == LINEAR) {
                prepare_row(o, row_of(e, o, at), e.own[thread], e.ready + at * stride_of(e, o));
            } else if (o.kind == EXPERTS || o.kind == ADAPT) {
                prepare_expert(e, o, o.kind == ADAPT ? e.adapted : e.experts, thread, at);
            } else if (o.kind == COPY) {
                copy(e, o, at);
            } else if (o.kind == MIX) {
                mix(e, o, at);
            } else if (o.kind == ROUTE && index % 2) {
                group(e.experts, rows_of(e, o) * o.heads, o.kv_heads);
            } else if (o.kind == ROUTE) {
                route(from.data + (int64_t)at * from.width, o, to.data + (int64_t)at * to.width, e.experts.asked + at * o.heads, (Chance*)e.own[thread]);
            } else if (o.kind == TURN) {
                turn(e, o, at);
            } else if (o.kind == ATTEND) {
                e.split ? attend_part(e, o, thread, at) : attend_whole(e, o, thread, at);
            } else if (o.kind == CROSS) {
                attend_cross(e, o, thread, at);
            } else if (o.kind == CONVOLVE) {
                convolve(e, o, at);
            } else if (o.kind == ATTEND_ALL) {
                index % 2 ? attend_all(e, o, thread, at) : gather(e, o, thread, at);
            } else if (o.kind == LOOKUP) {
                look_up(e, o, at);
            } else if (o.kind == RECUR) {
                index % 2 ? recur(e, o, at) : prepare_recurrence(e, o, at);
            } else if (o.kind == GATE) {
                gate(e, o, at);
            } else if (o.kind == KEEP) {
                keep(e, o, at);
            } else if (o.kind == RECALL) {
                __builtin_memcpy(to.data + (int64_t)at * to.width, state_of(e, o, at), (size_t)o.size * 4);
            } else if (o.kind == LSTM) {
                lstm(e, o, at);
            } else if (o.kind == NORM) {
                normalize(o, row_of(e, o, at), to.data + (int64_t)at * to.width, from.width);
            } else {  // the norm of what is read is added
                float *x = from.data + (int64_t)at * from.width, *y = to.data + (int64_t)at * to.width;
                normalize(o, x, x, from.width);
                for (int i = 0; i < from.width; i += VL) store(y + i, load(y + i) + load(x + i));
            }
        }
    });
}

}  // namespace

Code code() { return {share_of, run}; }
}  // namespace LEVEL
