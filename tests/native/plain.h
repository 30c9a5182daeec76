// What a model of `models.h` computes, in plain code: value by value, in double.
#pragma once
#include "models.h"

#include <algorithm>
#include <numeric>

using Row = std::vector<double>;

inline double activated(double x, int activation) {
    switch (activation) {
        case SILU: return x / (1 + exp(-x));
        case GELU: return 0.5 * x * (1 + erf(x * M_SQRT1_2));
        case GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case SIGMOID: return 1 / (1 + exp(-x));
        case QUICK_GELU: return x / (1 + exp(-1.702 * x));
        case RELU_SQUARED: return x > 0 ? x * x : 0;
        default: return x > 0 ? x : 0;
    }
}

inline Row normed(const Operation& o, const Row& x, const float* gain, int norm) {
    double mean = 0, squares = 0;
    for (double v : x) mean += norm == LAYER_NORM ? v / x.size() : 0;
    for (double v : x) squares += (v - mean) * (v - mean) / x.size();
    Row y;
    for (size_t i = 0; i < x.size(); i++)
        y.push_back((x[i] - mean) / sqrt(squares + o.epsilon) * gain[i] + (norm && o.shift ? o.shift[i] : 0));
    return y;
}

// `outputs` of a matrix, from output `first` on; what gates are multiplied with is `apart` from them
inline Row product(const Made& made, const Operation& o, Row x, const Row& before, int first, int outputs, int apart, const Row& more = {}) {
    const Matrix& m = *o.matrix;
    const std::vector<float>& weights = made.weights.at(&m);
    if (o.norm) x = normed(o, x, o.gain, o.norm);
    for (int g = 0; is_int8(m.format) && g < m.inputs; g += GROUP) {
        float largest = 0, most = m.planes > 1 ? 127 * 255 : 127;
        for (int i = g; i < std::min(m.inputs, g + GROUP); i++) largest = std::max(largest, (float)fabs(x[i]));
        for (int i = g; i < std::min(m.inputs, g + GROUP) && largest; i++)
            x[i] = nearbyintf((float)x[i] * (most / largest)) * largest / most;
    }
    for (double& v : x) {
        float nearest = (float)v;
        if (m.format == PAIRS) sixteen(nearest, BFLOAT16), v = nearest;
    }
    auto output = [&](int own) {
        const int out = first + own;
        double sum = (m.bias ? m.bias[out] : 0) + (more.empty() ? 0 : more[out]);
        for (int in = 0; in < m.inputs; in++) sum += x[in] * weights[(size_t)out * m.inputs + in];
        return sum;
    };
    Row y;
    for (int out = 0; out < outputs; out++) {
        double v = output(out);
        const double by = o.soft_cap ? o.soft_cap : 1;
        if (o.ending == GATED) v *= by;
        if (o.ending == GATED && o.cap > 0)
            v = activated(std::min(v, (double)o.cap), o.activation) * (std::clamp(output(apart + out), -(double)o.cap, (double)o.cap) + 1);
        else if (o.ending == GATED) v = activated(v, o.activation) * output(apart + out);
        if (o.ending == GATED_BY) v *= activated(output(apart + out) * by, o.activation);
        if (o.ending == ACTIVATED) v = activated(v, o.activation);
        v *= o.scale ? o.scale : 1;
        if (o.ending == CAPPED) v = o.cap * tanh(v / o.cap);
        if (o.ending == ADD_ACTIVATED) v = activated(v + before[out], o.activation);
        y.push_back(o.ending == ADD ? v + before[out] : v);
    }
    return y;
}

// The experts of a row, likeliest first, whose chances are written; and how far the others are from the last of them
inline std::vector<int> routed(const Operation& o, const Row& logits, Row& to, double& gap) {
    std::vector<int> ids(o.kv_heads);
    std::iota(ids.begin(), ids.end(), 0);
    double sum = 0, together = 0;
    for (int i : ids) sum += exp(logits[i]);
    const auto chance = [&](int i) { return o.activation == SIGMOID ? 1 / (1 + exp(-logits[i])) : exp(logits[i]) / sum; };
    const int each = o.column > 1 ? o.kv_heads / o.column : o.kv_heads;
    std::vector<bool> left_out(o.kv_heads);
    const auto value = [&](int i) { return left_out[i] ? -1e9 : chance(i) + (o.gain ? o.gain[i] : 0); };
    Row sums, sorted;
    for (int g = 0; g < o.kv_heads / each; g++) {
        Row own;
        for (int i = 0; i < each; i++) own.push_back(value(g * each + i));
        std::sort(own.rbegin(), own.rend());
        sums.push_back(std::accumulate(own.begin(), own.begin() + o.ahead, 0.0));
    }
    sorted = sums, std::sort(sorted.rbegin(), sorted.rend());
    const bool some = each < o.kv_heads && o.place < o.column;
    for (int i = 0; some && i < o.kv_heads; i++) left_out[i] = sums[i / each] < sorted[o.place - 1];
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return value(a) > value(b); });
    gap = o.heads < o.kv_heads ? value(ids[o.heads - 1]) - value(ids[o.heads]) : 1;
    if (some) gap = std::min(gap, sorted[o.place - 1] - sorted[o.place]);
    for (int r = 0; r < o.heads; r++) together += to[r] = chance(ids[r]);
    for (int r = 0; o.together && r < o.heads; r++) to[r] /= std::max(together, (double)o.epsilon) + o.cap;
    return ids;
}

// `key(p, d)` of the positions from `first` to `count`, `value(p, d)`, `added(p)` to the scores
template <class Key, class Value, class Added>
void attend(const Operation& o, const double* query, int first, int count, Key key, Value value, Added added,
            double* out, int size = 0, const float* sink = nullptr) {
    Row scores;
    double largest = -INFINITY, sum = 0;
    for (int p = first; p < count; p++) {
        double s = 0;
        for (int d = 0; d < o.size; d++) s += query[d] * key(p, d);
        scores.push_back((o.soft_cap > 0 ? o.soft_cap * tanh(s / o.soft_cap) : s) + added(p));
        largest = std::max(largest, scores.back());
    }
    for (double& s : scores) sum += s = exp(s - largest);
    if (sink) sum += exp(*sink - largest);
    for (int d = 0; d < (size ? size : o.size); d++) {
        out[d] = 0;
        for (int p = first; p < count; p++) out[d] += scores[p - first] / sum * value(p, d);
    }
}

inline double log_sum(const double* x, int count) {
    double largest = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++) largest = std::max(largest, x[i]);
    for (int i = 0; i < count; i++) sum += largest == -INFINITY ? 0 : exp(x[i] - largest);
    return sum > 0 ? largest + log(sum) : -INFINITY;
}

// Whether the library has left these logits of the `raw` ones, as a wish says
inline bool is_left(const Wish& w, const float* raw, const float* found, int count) {
    const Draw& d = w.draw;
    Row x(raw, raw + count);
    const double all = d.choice == BEAM ? log_sum(x.data(), count) : 0;
    for (double& one : x) one -= all;
    if (d.choice != NOTHING) {
        for (const Edit& edit : w.edits) {
            double& at = x[edit.token];
            at = edit.change == ADDED ? at + edit.value : edit.change == REPLACED ? edit.value : at < 0 ? at * edit.value : at / edit.value;
        }
        for (size_t i = 0; i < w.bans.size(); i += 2) std::fill(&x[0] + w.bans[i], &x[0] + w.bans[i + 1], -INFINITY);
        const double before = d.timestamps ? *std::max_element(&x[0], &x[0] + d.timestamps) : 0;
        const double from = d.timestamps ? log_sum(&x[0] + d.timestamps, count - d.timestamps) : 0;
        bool forced = d.timestamps && from > before;
        if (d.timestamps && fabs(from - before) < 1e-3)  // either way
            forced = std::all_of(found, found + d.timestamps, [](float one) { return one == -INFINITY; });
        if (forced) std::fill(&x[0], &x[0] + d.timestamps, -INFINITY);
        for (int i = 0; i < count && !w.allowed.empty(); i++)
            if (!(w.allowed[i / 8] >> i % 8 & 1)) x[i] = -INFINITY;
    }
    for (int i = 0; i < count; i++)
        if (x[i] == -INFINITY ? found[i] != -INFINITY : !(fabs(found[i] - x[i]) < 1e-3)) return false;
    return true;
}

// Whether what is told is right, of the logits as they were and as they are left
inline bool is_told(const Wish& w, const Found* told, const float* raw, const float* left, int count) {
    const Row before(raw, raw + count), after(left, left + count);
    const double whole = log_sum(before.data(), count), rest = log_sum(after.data(), count);
    for (int i = 0; i < w.draw.asked; i++)
        if (told[i].token != w.found[i].token || !(fabs(told[i].logprob - (raw[told[i].token] - whole)) < 1e-3)) return false;
    if (w.draw.choice == NOTHING) return true;
    std::vector<int> ids(count);
    std::iota(ids.begin(), ids.end(), 0);
    const auto score = [&](int id) { return left[id] + w.draw.total; };
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return score(a) > score(b); });
    for (int i = 0, size = (int)w.found.size() - w.draw.asked; i < size; i++) {
        const Found& one = told[w.draw.asked + i];
        const bool none = i >= count || left[ids[i]] == -INFINITY;
        if (none ? one.token != -1 : one.token != ids[i] || one.score != score(ids[i])) return false;
        if (!none && !(fabs(one.logprob - (left[ids[i]] - rest)) < 1e-3)) return false;
    }
    return true;
}

// Whether a draw may have chosen its token of these logits, with that log-probability: by a sort of all
inline bool is_chosen(const Draw& d, const float* logits, int count) {
    std::vector<int> ids(count);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    const double least = d.top_k > 0 && d.top_k < count ? logits[ids[d.top_k - 1]] : -INFINITY;
    if (logits[ids[0]] == -INFINITY) return d.token == -1 && std::isnan(d.logprob);
    double largest = logits[ids[0]], all = 0, total = 0, sum = 0, mass = 0, before = 0;
    Row chances;
    for (int i = 0; i < count; i++) {
        all += exp(logits[i] - largest);
        chances.push_back(logits[i] < least ? 0 : exp((logits[i] - largest) / d.temperature));
        total += chances[i];
    }
    if (d.token < 0 || d.token >= count) return false;
    if (!(fabs(logits[d.token] - largest - log(all) - d.logprob) < 1e-4)) return false;
    if (d.temperature == 0) return d.token == ids[0];
    int kept = 0;
    for (double& chance : chances) chance /= total;
    while (kept < count && (d.top_p >= 1 || sum < d.top_p)) sum += chances[ids[kept++]];
    ids.resize(kept);
    if (d.top_p >= 1) std::sort(ids.begin(), ids.end());
    for (double& chance : chances) chance = chance < d.min_p / total ? 0 : chance;
    for (int id : ids) mass += chances[id];
    for (int id : ids) {
        const double after = before + chances[id];
        if (id == d.token) return before <= mass * d.point + 1e-9 && after >= mass * d.point - 1e-9;
        before = after;
    }
    return false;
}

// A row of heads with states, which change
inline void recurred(const Operation& o, const Row& x, const Row& numbers, Row& state, Row& to) {
    const int each = o.kv_heads * o.distance_count, all = o.heads * o.size, from = o.column;
    const double* parts[] = {&x[from], &x[from + (o.paired ? all : each)], &x[from + (o.paired ? all + each : 2 * each)]};
    for (int h = 0; h < o.heads; h++) {
        const int key_head = h / (o.heads / o.kv_heads) * o.distance_count;
        Row query(parts[o.paired ? 2 : 0] + key_head, parts[o.paired ? 2 : 0] + key_head + o.distance_count);
        Row key(parts[1] + key_head, parts[1] + key_head + o.distance_count);
        for (Row* one : {&query, &key}) {
            double squares = o.epsilon;
            for (double v : *one) squares += v * v;
            for (double& v : *one) v *= (o.delta ? 1 / sqrt(squares) : 1) * (one == &query ? o.scale : 1);
        }
        const double first = numbers[o.ahead + h], second = numbers[o.ahead + o.heads + h];
        const double step = log1p(exp(o.delta ? second + o.shift[h] : first * o.soft_cap + o.shift[h]));
        const double strength = o.delta ? o.cap / (1 + exp(-first)) : std::min(std::max(step, (double)o.epsilon), (double)o.cap);
        const double decay = exp(o.gain[h] * (o.delta ? step : strength));
        for (int c = 0; c < o.size; c++) {
            const double value = parts[o.paired ? 0 : 2][h * o.size + c];
            double known = 0, found = o.query_gain ? o.query_gain[h] * value : 0;
            const auto at = [&](int d) -> double& { return state[(h * o.distance_count + d) * o.size + c]; };
            for (int d = 0; o.delta && d < o.distance_count; d++) known += key[d] * decay * at(d);
            for (int d = 0; d < o.distance_count; d++) {
                at(d) = decay * at(d) + key[d] * strength * (value - known);
                found += query[d] * at(d);
            }
            to[h * o.size + c] = found;
        }
    }
}

// Largest difference of a sequence's logits, as a part of the largest of the row's
inline double off(const Made& made, const Sequence& one, const std::vector<float>& found) {
    std::vector<Row> kept[LAYERS];  // keys and values of each position
    std::vector<std::vector<Row>> rows(one.length);
    std::vector<Row> hidden(one.length);
    Row cell, state;
    std::vector<std::vector<int>> asked(one.length);  // experts of each position, as they were last chosen
    int sure = one.length;
    double worst = 0, gap = 0;
    for (int position = 0; position < one.length; position++) {
        for (int width : made.widths) rows[position].emplace_back(width);
        Row& inputs = rows[position][0];
        std::copy_n(one.inputs.begin() + position * inputs.size(), inputs.size(), inputs.begin());  // looked up, too
    }
    for (size_t i = 0; i < made.operations.size() * one.length; i++) {  // each operation over all rows
        const Operation& o = made.operations[i / one.length];
        const int position = i % one.length;
        Row &x = rows[position][o.from], &to = rows[position][o.to];
        const int group = o.kv_heads ? o.heads / o.kv_heads : 0, behind = o.kv_heads * o.size;
        if (o.kind == NORM) to = normed(o, Row(x), o.gain, o.norm);
        for (double& v : to) v = o.kind == NORM && o.ending == ACTIVATED ? activated(v, o.activation) : v;
        const Row more = o.kind == LINEAR && o.delta && one.adapter >= 0 ? rows[position][o.table] : Row();
        if (o.kind == LINEAR) to = product(made, o, x, to, 0, made.widths[o.to], o.matrix->panels / 2 * PANEL, more);
        for (int p = 0; o.kind == ADAPT && one.adapter >= 0 && p * PANEL < o.size; p++) {
            const int first = (one.adapter * (o.matrix->panels / o.kv_heads) + p) * PANEL, begin = o.places ? o.places[p] : 0;
            const Row own(x.begin() + begin, o.places ? x.begin() + begin + o.matrix->inputs : x.end());
            const Row found = product(made, o, own, {}, first, std::min(PANEL, o.size - p * PANEL), 0);
            std::copy(found.begin(), found.end(), to.begin() + p * PANEL);
        }
        std::vector<int>& chosen = asked[position];
        if (o.kind == ROUTE) chosen = routed(o, x, to, gap);
        // who computes otherwise by so little may choose others, and so may all who attend to this row
        if (o.kind == ROUTE && gap < (made.most_format == INT8 || made.kv_format ? 0.1 : 1e-4))
            sure = made.joined ? 0 : std::min(sure, position);
        for (int r = 0; o.kind == EXPERTS && r < o.heads; r++) {
            const int each = o.matrix->panels / o.kv_heads * PANEL;
            const Row own(x.begin() + r * o.distance_count, x.begin() + r * o.distance_count + o.matrix->inputs);
            const Row found = product(made, o, own, {}, chosen[r] * each, o.size, each / 2);
            std::copy(found.begin(), found.end(), to.begin() + r * o.size);
        }
        for (int i = 0; o.kind == MIX && i < o.size; i++) {
            double sum = 0;
            for (int r = 0; r < o.heads; r++) sum += rows[position][o.table][r] * x[r * o.size + i];
            to[i] = sum * o.scale + (o.ending == ADD ? to[i] : 0);
        }
        if (o.kind == NORM_ADD)
            for (size_t i = 0; i < x.size(); i++) to[i] += normed(o, x, o.gain, o.norm)[i];
        const double factor = o.kind == TURN && o.shift ? o.scale * o.shift[position] : o.scale;
        for (int first : {0, o.heads}) {  // all queries together, and all keys
            if (o.kind != TURN || !o.together || !o.query_gain) break;
            const auto begin = x.begin() + first * o.size;
            const Row all(begin, begin + (first ? o.kv_heads : o.heads) * o.size);
            const Row done = normed(o, all, first ? o.key_gain : o.query_gain, NO_NORM);
            std::copy(done.begin(), done.end(), begin);
        }
        for (int h = 0; o.kind == TURN && h < o.heads + o.kv_heads; h++) {
            const auto begin = x.begin() + h * o.size;
            const float* gain = h < o.heads ? o.query_gain : o.key_gain;
            Row head(begin, begin + o.size);
            if (gain && !o.together) head = normed(o, head, gain, NO_NORM);
            for (int i = 0; i < o.turned / 2; i++) {
                const int place = position * made.turns.half + i, first = o.place + (o.paired ? 2 * i : i);
                const int second = o.paired ? first + 1 : first + o.turned / 2;
                const double a = head[first], b = head[second];
                const double c = made.turns.cosines[place], s = made.turns.sines[place];
                head[first] = a * c - b * s, head[second] = b * c + a * s;
            }
            for (int i = 0; i < o.size; i++) begin[i] = head[i] * (h < o.heads ? factor : 1);
        }
        const int values = o.value_size ? o.value_size : o.size;
        for (int h = 0; o.kind == TURN && o.gain && h < o.kv_heads; h++) {
            const auto begin = x.begin() + (o.heads + o.kv_heads) * o.size + h * values;
            const Row done = normed(o, Row(begin, begin + values), o.gain, NO_NORM);
            std::copy(done.begin(), done.end(), begin);
        }
        for (int i = 0; o.kind == COPY && i < o.heads * o.size; i++) {
            double& at = to[o.place + i / o.size * o.ahead + i % o.size];
            const double v = x[o.column + i / o.size * o.window + i % o.size] * o.scale;
            at = o.ending == ADD ? at + v : o.ending == GATED ? at * v : v;
        }
        if (o.kind == TURN && o.kv_heads) kept[o.layer].emplace_back(x.begin() + o.heads * o.size, x.end());
        for (size_t i = 0; o.kind == TURN && o.kv_heads && made.kv_format && i < kept[o.layer].back().size(); i++) {
            float nearest = (float)kept[o.layer].back()[i];
            sixteen(nearest, made.kv_format);
            kept[o.layer].back()[i] = nearest;
        }
        const std::vector<Row>& own = kept[o.layer];
        for (int h = 0; o.kind == ATTEND && h < o.heads; h++) {
            auto key = [&](int p, int d) { return own[p][h / group * o.size + d]; };
            auto value = [&](int p, int d) { return own[p][behind + h / group * values + d]; };
            const float* distances = o.distances ? o.distances + h * o.distance_count : nullptr;
            auto added = [&](int p) { return distances ? distances[std::min(position - p, o.distance_count - 1)] : 0; };
            const int first = o.window ? std::max(0, position + 1 - o.window) : 0;
            attend(o, &x[h * o.size], first, position + 1, key, value, added, &to[h * values], values, o.shift ? o.shift + h : nullptr);
        }
        auto nothing = [](int) { return 0; };
        const int most = o.distance_count / 2, first_of = position / made.block * made.block;
        const int part = o.by_chunk ? made.part : POSITIONS, begun = position / part * part, end = std::min(one.length, begun + part);
        const int low = o.window ? std::max(begun, first_of - o.window + 1) : begun;
        const int high = o.window ? std::min(end, first_of + made.block + o.ahead) : end;
        for (int h = 0; o.kind == ATTEND_ALL && h < o.heads; h++) {
            auto key = [&](int p, int d) { return o.scale * rows[p][o.from][behind + h * o.size + d]; };
            auto value = [&](int p, int d) { return rows[p][o.from][2 * behind + h * o.size + d]; };
            auto added = [&](int p) -> double {
                const int far = std::max(-most, std::min(most, p - position)) + most;
                double sum = o.distances ? o.distances[h * o.distance_count + far] : 0;
                for (const Matrix* m : {o.place_keys, o.place_queries}) {
                    if (!m) continue;
                    const float* of_place = &made.weights.at(m)[(h * (m->panels / o.heads) * PANEL + o.places[far]) * o.size];
                    const double* own = m == o.place_keys ? &x[h * o.size] : &rows[p][o.from][behind + h * o.size];
                    for (int d = 0; d < o.size; d++) sum += o.scale * own[d] * of_place[d];
                }
                return sum;
            };
            attend(o, &x[h * o.size], low, high, key, value, added, &to[h * o.size]);
        }
        if (o.kind == RECUR && position == 0) state.assign((size_t)o.heads * o.distance_count * o.size, 0.0);
        if (o.kind == RECUR) recurred(o, x, rows[position][o.table], state, to);
        for (int h = 0; o.kind == GATE && h < o.heads; h++) {
            Row head, gates;
            for (int i = 0; i < o.size; i++) {
                const double gate = o.scale * rows[position][o.table][o.ahead + h * o.distance_count + (o.distance_count == 1 ? 0 : i)];
                gates.push_back(o.ending == ACTIVATED ? activated(gate, o.activation) : gate);
                head.push_back(x[o.column + h * o.size + i] * (o.paired ? 1 : gates[i]));
            }
            if (o.norm) head = normed(o, head, o.gain + (o.together ? h * o.size : 0), NO_NORM);
            for (int i = 0; i < o.size; i++) to[h * o.size + i] = head[i] * (o.paired ? gates[i] : 1);
        }
        const size_t convolved = o.size && o.kind == CONVOLVE ? o.size : x.size();
        for (size_t c = 0; o.kind == CONVOLVE && c < convolved; c++) {
            double sum = o.shift[c];
            for (int t = 0; t < o.distance_count; t++) {
                const int at = position - o.window + t;
                if (at >= 0 && at < one.length) sum += rows[at][o.from][o.column + c] * o.gain[t * convolved + c];
            }
            to[c] = o.ending == ACTIVATED ? activated(sum, o.activation) : sum;
        }
        if (o.kind == LSTM) cell.resize(o.size);
        for (int i = 0; o.kind == LSTM && i < o.size; i++) {
            const auto gate = [&](int which) { return activated(x[which * o.size + i], SIGMOID); };
            cell[i] = gate(1) * cell[i] + gate(0) * tanh(x[2 * o.size + i]);
            to[i] = gate(3) * tanh(cell[i]);
        }
        if (o.kind == LSTM) hidden[position] = to;
        if (o.kind == RECALL) to = hidden[position];
        for (int h = 0; o.kind == CROSS && h < o.heads; h++) {
            const size_t each = (size_t)made.embeddings * made.cross_size, all = SLOTS * o.kv_heads * each;
            const float* keys = made.slots.data() + 2 * o.layer * all + (one.slot * o.kv_heads + h / group) * each;
            auto key = [&](int p, int d) { return o.scale * keys[p * made.cross_size + d]; };
            auto value = [&](int p, int d) { return keys[all + p * made.cross_size + d]; };
            attend(o, &x[h * o.size], 0, one.embeddings, key, value, nothing, &to[h * o.size]);
        }
    }
    for (int position = 0; position < sure; position++) {
        const Row& logits = rows[position].back();
        double largest = 1e-3, difference = 0;
        for (size_t i = 0; i < logits.size(); i++) {
            largest = std::max(largest, fabs(logits[i]));
            difference = std::max(difference, fabs(logits[i] - found[position * logits.size() + i]));
        }
        worst = std::max(worst, difference / largest);  // NaN is never larger: `found` has none, see `all_of`
    }
    return worst;
}
