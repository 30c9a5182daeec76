// Models for `properties.cpp`, of every kind of operation, drawn from a seed.
#pragma once
#include "../../native/step.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

constexpr int POSITIONS = 700, LAYERS = 2, SLOTS = 3;

struct Random {
    std::mt19937 bits;
    int upto(int low, int high) { return low + (int)(bits() % (uint32_t)(high - low + 1)); }
    bool one_in(int count) { return upto(1, count) == 1; }
    float value() { return (float)bits() / 2147483648.0f - 1.0f; }
    template <class T> T of(std::initializer_list<T> all) { return all.begin()[upto(0, (int)all.size() - 1)]; }
};

// Arrays of exactly so many values, so that a sanitizer sees who reads on; what nobody wrote is NaN.
struct Arena {
    std::vector<std::unique_ptr<void, decltype(&free)>> held;
    template <class T> T* take(size_t count) {
        void* at = nullptr;
        if (posix_memalign(&at, 64, count * sizeof(T))) abort();
        memset(at, 0xff, count * sizeof(T));
        held.emplace_back(at, free);
        return (T*)at;
    }
    float* values(size_t count, Random& draw, float scale, float around = 0.0f) {
        float* made = take<float>(count);
        for (size_t i = 0; i < count; i++) made[i] = around + scale * draw.value();
        return made;
    }
};

// Rounds to what half precision holds, whose bits it gives
inline uint16_t half(float& value) {
    int exponent;
    const int mantissa = (int)lrintf(fabsf(frexpf(value, &exponent)) * 2048), sign = std::signbit(value) ? 0x8000 : 0;
    const bool subnormal = exponent < -13 || value == 0.0f;
    const int bits = subnormal ? (int)lrintf(fabsf(value) * 0x1p24f) : ((exponent + 14) << 10) + mantissa - 1024;
    value = copysignf(subnormal ? bits * 0x1p-24f : ldexpf((float)mantissa, exponent - 11), value);
    return (uint16_t)(sign | bits);
}

// The bits of a number of 16 bits, of which ``value`` is the nearest one then
inline uint16_t sixteen(float& value, int format) {
    if (format == FLOAT16) return half(value);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&value, &bits, 4);
    return (uint16_t)(bits >> 16);
}

struct Made {
    Random draw;
    int extra;  // values behind each gain: a broken operation may read as many as the widest buffer has
    Arena arena;
    std::vector<Operation> operations;
    std::vector<int> widths;
    std::deque<Matrix> matrices;
    std::map<const Matrix*, std::vector<float>> weights;  // [32 * panels][inputs]
    Turns turns;
    int heads, kv_heads, size, value_size, embeddings, most_format, cross_heads, cross_size, kv_format;
    int experts = 0, asked = 0;     // of a row; or there are none
    int adapters = 0;               // slots of them, or none
    bool paged, joined;             // without pages it is an encoder; joined: whose rows attend to all of their sequence
    int part;                       // rows of each chunk of a joined sequence without a state
    bool stated;                    // and are fed part by part: they see some blocks before their own
    bool recurrent;                 // neither of both, and each row has the state after the one before
    bool carried;                   // paged, and layers have recurrent parts
    int block = 1, kept = 0, state = 0;
    const uint8_t* cross = nullptr;
    std::vector<float> slots;       // what they hold
    const Matrix* words = nullptr;  // that tokens are looked up in, or none
    bool looked_up = false;         // a matrix that is drawn is such a one
    float words_scale;
    const float* places = nullptr;  // what is added to them by position, or none
    const float* typed = nullptr;   // and by type
    int types = 1;

    int buffer(int width) { return widths.push_back(width), (int)widths.size() - 1; }

    float* gain(int width) { return arena.values(width + extra, draw, 0.5f, 1.0f); }

    Operation& add(Kind kind, int from, int to) {
        Operation o{};
        o.kind = kind, o.from = from, o.to = to, o.epsilon = 1e-5f, o.scale = 1.0f;
        return operations.push_back(o), operations.back();
    }

    void norm(Operation& o) {
        o.norm = draw.of({RMS, LAYER_NORM});
        o.gain = gain(widths[o.from]);
        if (o.norm == LAYER_NORM) o.shift = gain(widths[o.from]);
    }

    const Matrix* matrix(int inputs, int outputs, bool gated, int most) {
        const int panels = (outputs + PANEL - 1) / PANEL * (gated ? 2 : 1);
        const int drawn = draw.upto(FLOAT32, most), format = drawn == INT8 && draw.one_in(2) ? INT8_16 : drawn, groups = (inputs + GROUP - 1) / GROUP;
        if (is_int8(drawn) && inputs % GROUP == 0 && draw.one_in(2)) return packed(inputs, outputs, panels);
        const size_t values = format == PAIRS ? (inputs + 1) / 2 * 2 : inputs;
        const int of_scale = format == INT8 ? 4 : 2;
        const size_t bytes = (size_t)PANEL * (is_int8(format) ? groups * (of_scale + GROUP) : values * (format ? 2 : 4));
        uint8_t* packed = arena.take<uint8_t>(panels * bytes);
        if (is_narrowed(format)) memset(packed, 0, panels * bytes);
        std::vector<float> plain((size_t)panels * PANEL * inputs);
        for (int out = 0; out < panels * PANEL; out++) {
            float scale = 0;
            for (int in = 0; in < inputs; in++) {
                float w = draw.value() * 1.7f / sqrtf((float)inputs);
                uint8_t* at = packed + out / PANEL * bytes;
                const size_t of_pair = ((size_t)in / 2 * PANEL + out % PANEL) * 2 + in % 2;
                const size_t place = format == PAIRS ? of_pair : (size_t)in * PANEL + out % PANEL;
                if (is_int8(format)) {
                    at += (size_t)(in / GROUP) * PANEL * (of_scale + GROUP);
                    if (in % GROUP == 0) {
                        scale = (1.0f + 0.3f * draw.value()) / 127 / sqrtf((float)inputs);
                        if (format == INT8) ((float*)at)[out % PANEL] = scale;
                        else ((uint16_t*)at)[out % PANEL] = sixteen(scale, FLOAT16);
                    }
                    const int value = draw.upto(-127, 127), k = in % GROUP;
                    ((int8_t*)at)[of_scale * PANEL + k / 4 * 4 * PANEL + out % PANEL * 4 + k % 4] = (int8_t)value;
                    w = scale * value;
                } else if (format != FLOAT32) {
                    ((uint16_t*)at)[place] = sixteen(w, format);
                } else {
                    ((float*)at)[place] = w;
                }
                plain[(size_t)out * inputs + in] = w;
            }
        }
        return keep({format, inputs, outputs, panels, packed}, plain);
    }

    const Matrix* keep(Matrix matrix, const std::vector<float>& plain) {
        matrix.bias = draw.one_in(2) ? arena.values(PANEL * matrix.panels, draw, 0.3f) : nullptr;
        matrix.planes = draw.upto(0, 2);
        matrices.push_back(matrix);
        weights[&matrices.back()] = plain;
        return &matrices.back();
    }

    // Of blocks of any numbers with scales of some size, of one kind or of two
    const Matrix* packed(int inputs, int outputs, int panels) {
        constexpr float TOP[PACKINGS] = {0, 127, 8, 15, 16, 31, 63 * 15, 63 * 31, 128 * 32, 127, 32 * 127, 1, 8, 8};
        const int split = draw.upto(1, panels), count = split < panels ? 2 : 1;
        Section* sections = arena.take<Section>(count);
        std::vector<float> plain((size_t)panels * PANEL * inputs);
        for (int i = 0, panel = 0; i < count; panel += sections[i++].panels) {
            const int packing = inputs % 256 ? draw.upto(Q8_0, Q5_1) : draw.upto(Q8_0, PACKINGS - 1), own = i ? panels - split : split;
            const Layout& l = LAYOUTS[packing];
            const size_t of_row = (size_t)inputs / l.inputs * l.block;
            std::vector<uint8_t> blocks(own * PANEL * of_row);
            for (uint8_t& byte : blocks) byte = (uint8_t)draw.upto(0, 255);
            for (size_t at = 0; at < blocks.size(); at += l.block) {
                const float size = (0.5f + fabsf(draw.value()) / 2) / sqrtf((float)inputs);
                float scale = size / TOP[packing], added = l.head ? size / 63 : -size / 2;
                const uint16_t halves[2] = {sixteen(scale, FLOAT16), sixteen(added, FLOAT16)};
                if (is_int4(packing)) memcpy(&blocks[at], &scale, 4);
                else if (packing == MXFP4) blocks[at] = (uint8_t)(124 - (int)log2f(sqrtf((float)inputs)));
                else memcpy(&blocks[at + (packing == Q6_K ? 208 : 0)], halves, l.adds ? 4 : 2);
            }
            uint8_t* to = arena.take<uint8_t>(own * triolet_packed_bytes(packing, inputs));
            triolet_pack(packing, blocks.data(), own * PANEL, inputs, to);
            std::vector<int64_t> all(own * PANEL);
            for (size_t out = 0; out < all.size(); out++) all[out] = (int64_t)out;
            triolet_unpack(packing, to, inputs, all.data(), own * PANEL, &plain[(size_t)panel * PANEL * inputs]);
            sections[i] = {packing, own, to};
        }
        int32_t* order = looked_up || draw.one_in(2) ? nullptr : arena.take<int32_t>(inputs);
        for (int i = 0; order && i < inputs; i++) order[i] = i;
        if (order) std::shuffle(order, order + inputs, draw.bits);
        const std::vector<float> straight = plain;
        for (size_t i = 0; order && i < plain.size(); i++) plain[i / inputs * inputs + order[i % inputs]] = straight[i];
        return keep({PACKED, inputs, outputs, panels, nullptr, nullptr, sections, order, count}, plain);
    }

    // What adapters add to a linear layer of all rows
    int adapt(int from, int outputs, bool gated, bool normed) {
        const int panels = (outputs + PANEL - 1) / PANEL * (gated ? 2 : 1), rank = draw.of({1, 5, 32, 40}), inputs = draw.upto(1, rank);
        const int low = buffer(rank), added = buffer(panels * PANEL), each = (rank + PANEL - 1) / PANEL * PANEL;
        Operation& down = add(ADAPT, from, low);
        if (normed) norm(down);
        down.matrix = matrix(widths[from], adapters * each, false, most_format), down.size = rank;
        down.heads = 1, down.kv_heads = adapters;
        Operation& up = add(ADAPT, low, added);
        up.matrix = matrix(inputs, adapters * panels * PANEL, false, FLOAT32), up.size = panels * PANEL;
        up.heads = 1, up.kv_heads = adapters, up.distance_count = panels;
        int32_t* places = arena.take<int32_t>(panels);
        for (int p = 0; p < panels; p++) places[p] = p && draw.one_in(2) ? places[p - 1] : draw.upto(0, rank - inputs);
        up.places = places;
        return added;
    }

    Operation& linear(int from, int to, int ending, bool normed) {
        const bool gated = ending == GATED || ending == GATED_BY, adapted = adapters && ending != CAPPED && draw.one_in(2);
        const int added = adapted ? adapt(from, widths[to], gated, normed) : 0;
        Operation& o = add(LINEAR, from, to);
        o.delta = adapted, o.table = added;
        if (normed) norm(o);
        o.matrix = matrix(widths[from], widths[to], gated, most_format);
        o.ending = ending, o.activation = draw.of({SILU, GELU, GELU_TANH, RELU, SIGMOID, QUICK_GELU, RELU_SQUARED});
        o.cap = ending == CAPPED ? 5.0f : draw.of({0.0f, 0.5f}), o.soft_cap = draw.of({0.0f, 1.0f, 0.8f});
        o.scale = draw.of({0.0f, 1.0f, 0.7f});
        return o;
    }

    void mix(int from, int to, int weights, int asked, int size, int ending) {
        Operation& o = add(MIX, from, to);
        o.table = weights, o.heads = asked, o.size = size, o.ending = ending, o.scale = draw.of({1.0f, 0.7f});
    }

    // Numbers of a row that go elsewhere: all of them, then some to several places, then all of those back
    void copy(int from, int to) {
        const int width = widths[from];
        Operation& all = add(COPY, from, to);
        all.heads = 1, all.size = width, all.scale = 1.0f;
        Operation& some = add(COPY, from, to);
        some.heads = draw.upto(1, 4), some.size = draw.upto(1, width / 4), some.scale = draw.of({1.0f, 0.3f});
        some.window = draw.upto(0, width / 4), some.ahead = draw.upto(some.size, width / 4);
        some.column = draw.upto(0, std::min(width / 4 - 1, width - 3 * some.window - some.size)), some.place = draw.upto(0, width - 3 * some.ahead - some.size);
        some.ending = draw.of({STORE, ADD, GATED});
        Operation& back = add(COPY, to, from);
        back.heads = 1, back.size = width, back.scale = 0.3f, back.ending = ADD;
    }

    // Each expert's outputs, of what all read, or each its own
    void multiply(int from, int to, int inputs, int size, int ending, bool normed) {
        Operation& o = add(EXPERTS, from, to);
        const int panels = (size + PANEL - 1) / PANEL * (ending == GATED || ending == GATED_BY ? 2 : 1);
        if (normed) norm(o);
        else o.distance_count = inputs;
        o.matrix = matrix(inputs, experts * panels * PANEL, false, most_format);
        o.ending = ending, o.activation = draw.of({SILU, GELU}), o.cap = draw.of({0.0f, 0.5f}), o.heads = asked, o.kv_heads = experts, o.size = size;
    }

    // Experts, and what is added of them. `room`: buffers of logits, chances, what experts compute twice, and a number
    void route(int hidden, int added, const int* room) {
        const int size = widths[room[2]] / asked;
        linear(hidden, room[0], STORE, true);
        Operation& o = add(ROUTE, room[0], room[1]);
        o.heads = asked, o.kv_heads = experts, o.together = draw.one_in(2), o.epsilon = draw.of({0.0f, 0.9f});
        o.activation = draw.of({SILU, SIGMOID}), o.cap = draw.of({0.0f, 0.3f});
        if (draw.one_in(2)) o.gain = gain(experts);
        if (experts == 70 && draw.one_in(2)) o.column = 5, o.place = draw.upto(1, 5), o.ahead = draw.upto(1, 3);
        multiply(hidden, room[2], widths[hidden], size, draw.of({GATED, GATED_BY, ACTIVATED}), true);
        multiply(room[2], room[3], size, widths[hidden], STORE, false);
        mix(room[3], added, room[1], asked, widths[hidden], STORE);
        linear(hidden, room[4], ACTIVATED, true);
        mix(added, hidden, room[4], 1, widths[hidden], ADD);
    }

    // Of `distance_count` distances, and what is added to scores by them
    void place(Operation& o) {
        int32_t* places = arena.take<int32_t>(o.distance_count);
        const int rise = draw.of({1, 9});
        for (int i = 0; i < o.distance_count; i++) places[i] = i ? places[i - 1] + draw.one_in(rise) : draw.upto(0, 40);
        const int outputs = o.heads * (places[o.distance_count - 1] / PANEL + 1) * PANEL;
        o.places = places;
        if (!draw.one_in(3)) o.place_keys = matrix(o.size, outputs, false, FLOAT32);
        if (!stated && !draw.one_in(3)) o.place_queries = matrix(o.size, outputs, false, FLOAT32);
    }

    // The last operation reads rows of a state, which the next one keeps
    void keep(int from, int column, int size, int rows) {
        if (!(stated || carried) || !rows) return;
        operations.back().place = state;
        Operation& o = add(KEEP, from, from);
        o.column = column, o.size = size, o.window = rows, o.place = state;
        state += rows * size;
    }

    // A convolution, heads with states, and gates
    void recur(int hidden, int depth, int groups, int shared, int columns) {
        const int own = groups * shared, values = own * columns, mixed = 2 * groups * depth + values, wide = (mixed + 15) / 16 * 16;
        const bool delta = draw.one_in(2), first = draw.one_in(2);
        const int split = buffer(wide + values + 3 + 2 * own), convolved = buffer(wide), made = buffer(values);
        linear(hidden, split, STORE, true);
        Operation& o = add(CONVOLVE, split, convolved);
        o.distance_count = kept + 1, o.window = kept, o.column = values, o.size = wide;
        o.ending = draw.of({STORE, ACTIVATED}), o.activation = SILU;
        o.gain = arena.values((size_t)o.distance_count * (wide + extra), draw, 0.5f), o.shift = gain(wide);
        keep(split, values, wide, kept);
        Operation& heads = add(RECUR, convolved, made);
        heads.heads = own, heads.kv_heads = groups, heads.size = columns, heads.distance_count = depth;
        heads.table = split, heads.ahead = values + wide + 1, heads.place = state, heads.column = wide - mixed;
        heads.paired = draw.one_in(2), heads.delta = delta, heads.scale = draw.of({1.0f, 0.4f});
        heads.gain = arena.values(own + extra, draw, 0.5f, -0.7f), heads.shift = gain(own);
        heads.soft_cap = 0.8f, heads.cap = delta ? draw.of({1.0f, 2.0f}) : draw.of({INFINITY, 1.5f});
        if (!delta) heads.epsilon = draw.of({0.0f, 0.6f});
        if (!delta && draw.one_in(2)) heads.query_gain = gain(own);
        state += own * ((columns + PANEL - 1) / PANEL) * PANEL * depth;
        Operation& gates = add(GATE, made, made);
        const bool whole = draw.one_in(3), apart = draw.one_in(2);
        gates.heads = apart ? own : groups, gates.size = values / gates.heads, gates.distance_count = whole ? 1 : gates.size;
        gates.table = split, gates.ahead = whole ? 5 % values : 0, gates.paired = first, gates.together = draw.one_in(2);
        if (gates.ahead + gates.heads * gates.distance_count > widths[split]) gates.ahead = 0;
        gates.ending = draw.of({STORE, ACTIVATED}), gates.activation = draw.of({SILU, SIGMOID}), gates.scale = draw.of({1.0f, 0.7f});
        if (draw.one_in(2)) gates.norm = RMS, gates.gain = gain(values);
        linear(made, hidden, ADD, false);
    }

    void fill_slots() {
        const size_t rows = (size_t)LAYERS * 2 * SLOTS * cross_heads * embeddings;
        uint8_t* made = arena.take<uint8_t>(rows * cross_size * kv_bytes());  // behind each head nobody wrote
        slots.resize(rows * cross_size);
        for (size_t i = 0; i < rows * size; i++) {
            const size_t place = i / size * cross_size + i % size;
            slots[place] = draw.value();
            if (kv_format == FLOAT32) ((float*)made)[place] = slots[place];
            else ((uint16_t*)made)[place] = sixteen(slots[place], kv_format);
        }
        cross = made;
    }

    size_t kv_bytes() const { return kv_format == FLOAT32 ? 4 : 2; }

    Made(uint32_t seed, int extra) : draw{std::mt19937(seed)}, extra(extra) {
        most_format = draw.of({BFLOAT16, INT8, PAIRS}), kv_format = draw.of({FLOAT32, FLOAT16, BFLOAT16});
        paged = !draw.one_in(3), joined = !paged && !draw.one_in(3), stated = joined && draw.one_in(2);
        recurrent = !paged && !joined && draw.one_in(2), part = draw.of({1, 30, 64, POSITIONS});
        if (stated) block = draw.of({1, 3, 14});
        carried = paged && draw.one_in(2);
        const int before = !stated ? 0 : block == 1 ? draw.of({0, 3, 140}) : draw.upto(0, 3);  // blocks
        if (stated) kept = std::max(8, before * block);
        if (carried) kept = draw.of({1, 2, 6});
        const int depth = draw.of({1, 3, 16, 21}), groups = draw.upto(1, 2), shared = draw.upto(1, 2), columns = draw.of({1, 20, 32, 50});
        kv_heads = draw.upto(1, 3), heads = kv_heads * (paged ? draw.upto(1, 3) : 1), embeddings = draw.of({1, 7, 150});
        size = draw.of({2, 3, 7, 12, 16, 20, 33, 40, 64});
        const int half = draw.upto(0, size / 2), narrow = heads * size, hidden = buffer(16 * draw.upto(1, 9));
        value_size = paged ? draw.of({0, 1, 5, 24, 64}) : 0;
        const int values = value_size ? value_size : size, wide = buffer(narrow + kv_heads * (size + values));
        const int attended = buffer(narrow), seen = paged ? buffer(heads * values) : attended, queries = buffer(narrow);
        const int inner = buffer(draw.upto(1, 150)), added = buffer(widths[hidden]), last = buffer(widths[hidden]);
        int room[5];
        adapters = draw.one_in(2) ? draw.of({1, 2, 5}) : 0;
        if (draw.one_in(3)) {
            experts = draw.of({1, 2, 3, 5, 70}), asked = draw.one_in(2) ? std::min(experts, 6) : draw.upto(1, std::min(experts, 6));
            const int widths_of[] = {experts, asked, asked * draw.of({1, 20, 32, 70}), asked * widths[hidden], 1};
            for (int i = 0; i < 5; i++) room[i] = buffer(widths_of[i]);
        }
        turns = {arena.take<float>(POSITIONS * half + 1), arena.take<float>(POSITIONS * half + 1), POSITIONS, half};
        for (int i = 0; i < POSITIONS * half; i++) {
            const double angle = i / half * pow(1e4, -(double)(i % half) / half);
            ((float*)turns.cosines)[i] = (float)cos(angle), ((float*)turns.sines)[i] = (float)sin(angle);
        }
        cross_heads = draw.of({heads, kv_heads}), cross_size = size + draw.of({0, 3, 16});
        if (paged && !carried && draw.one_in(2)) fill_slots();
        if (draw.one_in(2)) {
            Operation& o = add(LOOKUP, hidden, hidden);
            looked_up = true;
            o.matrix = words = matrix(widths[hidden], draw.upto(1, 100), false, most_format);
            looked_up = false;
            o.scale = words_scale = draw.of({1.0f, 5.6f});
            if (draw.one_in(2)) {
                o.distance_count = POSITIONS + 9;
                o.shift = places = arena.values((size_t)(o.distance_count + extra) * widths[hidden], draw, 1.0f);
            }
            if (draw.one_in(2)) {
                o.heads = types = draw.upto(1, 3);
                o.gain = typed = arena.values((size_t)(types + extra) * (widths[hidden] + extra), draw, 1.0f);
            }
        }
        const bool gained = draw.one_in(2), capped = draw.one_in(3), behind = draw.one_in(3), paired = draw.one_in(2);
        const int distances = draw.one_in(3) ? draw.of({1, 30, 600}) + (joined && draw.one_in(2) ? 30 : 0) : 0;
        const bool turned = paged || draw.one_in(2);
        for (int layer = 0; layer < LAYERS; layer++) {
            if (joined || paged) linear(hidden, wide, STORE, true);
            Operation turn{};
            turn.kind = TURN, turn.from = turn.to = wide, turn.epsilon = 1e-5f;
            turn.layer = layer, turn.heads = heads, turn.kv_heads = kv_heads, turn.size = size, turn.turned = 2 * half;
            turn.scale = 1.0f / sqrtf((float)size), turn.soft_cap = capped ? 2.0f : 0.0f;
            turn.window = draw.one_in(2) ? draw.of({1, 5, 140, 600}) : 0;
            turn.together = draw.one_in(2), turn.value_size = value_size;
            if (gained) turn.query_gain = gain(size * (turn.together ? heads : 1));
            if (gained) turn.key_gain = gain(size * (turn.together ? kv_heads : 1));
            turn.paired = paired, turn.distance_count = joined ? distances | 1 : distances;
            if (distances) turn.distances = arena.values((size_t)(heads + extra) * turn.distance_count, draw, 1.0f);
            Operation attend = turn;
            attend.kind = joined ? ATTEND_ALL : ATTEND, attend.to = seen;
            if (paged && draw.one_in(3)) attend.shift = gain(heads);
            turn.place = draw.upto(0, size - 2 * half);
            if (draw.one_in(3)) turn.gain = gain(values);
            if (paged && layer && draw.one_in(3)) attend.layer = 0, turn.kv_heads = 0;  // those of the layer before
            if (joined) attend.soft_cap = 0.0f, attend.ahead = turn.window ? draw.of({0, 3, turn.window - 1}) : 0;
            attend.quantized = joined && most_format == INT8 && draw.one_in(2);
            attend.by_chunk = joined && !stated && draw.one_in(2);
            if (stated) attend.window = before * block + 1, attend.ahead = 0;
            if (joined && draw.one_in(2)) place(attend);
            if (draw.one_in(3)) turn.distance_count = POSITIONS + 9, turn.shift = gain(turn.distance_count);
            if (turned && (joined || paged)) operations.push_back(turn);
            if (joined || paged) operations.push_back(attend);
            keep(wide, heads * size, 2 * heads * size, stated ? kept : 0);
            if (joined || paged) linear(seen, hidden, ADD, false);
            if (draw.one_in(3)) copy(hidden, added);
            if (cross) {
                linear(hidden, queries, STORE, true);
                Operation& o = add(CROSS, queries, attended);
                o.layer = layer, o.heads = heads, o.kv_heads = cross_heads, o.size = size;
                o.scale = draw.of({1.0f, 0.3f});
                linear(attended, hidden, ADD, false);
            }
            if (joined && draw.one_in(2)) {
                Operation& o = add(CONVOLVE, hidden, added);
                o.distance_count = draw.of({1, 4, 9}), o.window = stated ? o.distance_count - 1 : draw.upto(0, o.distance_count - 1);
                o.ending = draw.of({STORE, ACTIVATED});
                o.gain = arena.values((size_t)o.distance_count * (widths[hidden] + extra), draw, 0.5f);
                o.shift = gain(widths[hidden]), o.activation = draw.of({SILU, SIGMOID});
                keep(hidden, 0, widths[hidden], o.window);
                if (draw.one_in(2)) {
                    Operation& second = add(NORM, added, added);
                    norm(second);
                    second.ending = ACTIVATED, second.activation = draw.of({SILU, RELU});
                }
                norm(add(NORM_ADD, added, hidden));
            }
            if (carried) recur(hidden, depth, groups, shared, columns);
            if (experts) route(hidden, added, room);
            linear(hidden, inner, draw.of({GATED, GATED_BY, ACTIVATED}), true);
            linear(inner, behind ? added : hidden, behind ? STORE : draw.of({ADD, ADD_ACTIVATED}), false);
            if (behind) norm(add(NORM_ADD, added, hidden));
        }
        if (recurrent) {
            const int count = draw.of({1, 7, 40}), gates = buffer(4 * count), made = buffer(count), again = buffer(count);
            state = 2 * count + 3;
            linear(hidden, gates, STORE, true);
            for (Kind kind : {LSTM, RECALL}) {
                Operation& o = add(kind, gates, kind == LSTM ? made : again);
                o.size = count, o.place = 2;
            }
            linear(made, hidden, ADD, false), linear(again, hidden, ADD, false);
        }
        Operation& final = add(NORM, hidden, last);
        norm(final);
        final.wanted = 1;
        const int logits = buffer(draw.one_in(8) ? 1500 : draw.upto(1, 130));
        const int slots = std::exchange(adapters, 0);  // those rows have none
        linear(last, logits, capped ? CAPPED : STORE, false).wanted = 2;
        adapters = slots;
    }

};

// What is asked of a row's logits, and what was first found
struct Wish {
    Draw draw{};
    std::vector<Edit> edits;
    std::vector<int32_t> bans;
    std::vector<Found> found;
    std::vector<uint8_t> allowed;

    Wish() = default;
    Wish(Random& any, int tokens) {
        const auto some = [&](int most) { return any.one_in(2) ? 0 : any.upto(1, most); };
        draw = {any.of({0.0, 0.3, 1.0, 5.0}), any.of({1.0, 0.5, 0.999}), any.of({0.0, 0.1}), any.bits() / 4294967296.0};
        draw.choice = any.of({NOTHING, TOKEN, TOKEN, BEAM}), draw.top_k = any.of({0, 0, 1, 5, 999});
        draw.timestamps = any.one_in(3) ? any.upto(1, tokens) : 0, draw.total = any.one_in(2) ? any.value() : 0.0f;
        for (int i = some(4); i--;)
            edits.push_back({any.upto(0, tokens - 1), any.of({ADDED, SCALED, REPLACED}), any.of({-2.5f, 0.0f, 1.5f})});
        for (int i = 0; i < (int)edits.size(); i++)
            if (edits[i].change == SCALED) edits[i].value = 1.5f;
        for (int i = some(3); i--;) {
            const int from = any.upto(0, tokens);
            bans.insert(bans.end(), {from, any.upto(from, std::min(tokens, from + 40))});
        }
        if (any.one_in(3))
            for (int i = 0; i < (tokens + 7) / 8; i++) allowed.push_back((uint8_t)any.of({255, 0, (int)(any.bits() & 255)}));
        draw.asked = some(3);
        for (int i = 0; i < draw.asked; i++) found.push_back({any.upto(0, tokens - 1), 0.0f, 0.0f});
        for (int i = some(12); i--;) found.push_back({0, 0.0f, 0.0f});
    }
};

struct Sequence {
    std::vector<float> inputs;
    int length, slot, embeddings;
    std::vector<int32_t> tokens, types;  // whose embeddings the inputs are, or none
    std::vector<Wish> wishes;     // of each position
    std::map<int, std::vector<float>> states;  // behind so many positions, as they were first found
    int adapter = -1;             // its slot, or none
};
