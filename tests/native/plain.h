// What a model of `models.h` computes, in plain code: value by value, in double.
#pragma once
#include "models.h"

#include <algorithm>

using Row = std::vector<double>;

inline double activated(double x, int activation) {
    switch (activation) {
        case SILU: return x / (1 + exp(-x));
        case GELU: return 0.5 * x * (1 + erf(x * M_SQRT1_2));
        case GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
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

inline Row product(const Made& made, const Operation& o, Row x, const Row& before) {
    const Matrix& m = *o.matrix;
    const std::vector<float>& weights = made.weights.at(&m);
    if (o.norm) x = normed(o, x, o.gain, o.norm);
    for (int g = 0; m.format == INT8 && g < m.inputs; g += GROUP) {
        float largest = 0;
        for (int i = g; i < std::min(m.inputs, g + GROUP); i++) largest = std::max(largest, (float)fabs(x[i]));
        for (int i = g; i < std::min(m.inputs, g + GROUP) && largest; i++)
            x[i] = nearbyintf((float)x[i] * (127 / largest)) * largest / 127;
    }
    auto output = [&](int out) {
        double sum = m.bias ? m.bias[out] : 0;
        for (int in = 0; in < m.inputs; in++) sum += x[in] * weights[(size_t)out * m.inputs + in];
        return sum;
    };
    Row y;
    for (int out = 0; out < made.widths[o.to]; out++) {
        double v = output(out);
        if (o.ending == GATED) v = activated(v, o.activation) * output(m.panels / 2 * PANEL + out);
        if (o.ending == ACTIVATED) v = activated(v, o.activation);
        if (o.ending == CAPPED) v = o.cap * tanh(v / o.cap);
        y.push_back(o.ending == ADD ? v + before[out] : v);
    }
    return y;
}

// `key(p, d)` of `count` positions, `value(p, d)` behind
template <class Key, class Value>
void attend(const Operation& o, const double* query, int first, int count, Key key, Value value, double* out) {
    Row scores;
    double largest = -INFINITY, sum = 0;
    for (int p = first; p < count; p++) {
        double s = 0;
        for (int d = 0; d < o.size; d++) s += query[d] * key(p, d);
        scores.push_back(o.soft_cap > 0 ? o.soft_cap * tanh(s / o.soft_cap) : s);
        largest = std::max(largest, scores.back());
    }
    for (double& s : scores) sum += s = exp(s - largest);
    for (int d = 0; d < o.size; d++) {
        out[d] = 0;
        for (int p = first; p < count; p++) out[d] += scores[p - first] / sum * value(p, d);
    }
}

// Largest difference of a sequence's logits, as a part of the largest of the row's
inline double off(const Made& made, const Sequence& one, const std::vector<float>& found) {
    std::vector<Row> kept[LAYERS];  // keys and values of each position
    double worst = 0;
    for (int position = 0; position < one.length; position++) {
        std::vector<Row> at(made.widths.size());
        for (size_t b = 0; b < at.size(); b++) at[b].resize(made.widths[b]);
        at[0].assign(one.inputs.begin() + position * at[0].size(), one.inputs.begin() + (position + 1) * at[0].size());
        for (const Operation& o : made.operations) {
            Row &x = at[o.from], &to = at[o.to];
            const int group = o.kv_heads ? o.heads / o.kv_heads : 0, behind = o.kv_heads * o.size;
            if (o.kind == NORM) to = normed(o, x, o.gain, o.norm);
            if (o.kind == LINEAR) to = product(made, o, x, to);
            if (o.kind == NORM_ADD)
                for (size_t i = 0; i < x.size(); i++) to[i] += normed(o, x, o.gain, o.norm)[i];
            for (int h = 0; o.kind == TURN && h < o.heads + o.kv_heads; h++) {
                const auto begin = x.begin() + h * o.size;
                const float* gain = h < o.heads ? o.query_gain : o.key_gain;
                Row head(begin, begin + o.size);
                if (gain) head = normed(o, head, gain, NO_NORM);
                for (int i = 0; i < o.turned / 2; i++) {
                    const int place = position * made.turns.half + i;
                    const double a = head[i], b = head[o.turned / 2 + i];
                    const double c = made.turns.cosines[place], s = made.turns.sines[place];
                    head[i] = a * c - b * s, head[o.turned / 2 + i] = b * c + a * s;
                }
                for (int i = 0; i < o.size; i++) begin[i] = head[i] * (h < o.heads ? o.scale : 1);
            }
            if (o.kind == TURN) kept[o.layer].emplace_back(x.begin() + o.heads * o.size, x.end());
            const std::vector<Row>& own = kept[o.layer];
            for (int h = 0; o.kind == ATTEND && h < o.heads; h++) {
                auto key = [&](int p, int d) { return own[p][h / group * o.size + d]; };
                auto value = [&](int p, int d) { return own[p][behind + h / group * o.size + d]; };
                const int first = o.window ? std::max(0, position + 1 - o.window) : 0;
                attend(o, &x[h * o.size], first, position + 1, key, value, &to[h * o.size]);
            }
            for (int h = 0; o.kind == CROSS && h < o.heads; h++) {
                const size_t each = (size_t)made.embeddings * o.size, all = SLOTS * o.heads * each;
                const float* keys = made.cross + 2 * o.layer * all + (one.slot * o.heads + h) * each;
                auto key = [&](int p, int d) { return keys[p * o.size + d]; };
                auto value = [&](int p, int d) { return keys[all + p * o.size + d]; };
                attend(o, &x[h * o.size], 0, one.embeddings, key, value, &to[h * o.size]);
            }
        }
        double largest = 1e-3, difference = 0;
        for (size_t i = 0; i < at.back().size(); i++) {
            largest = std::max(largest, fabs(at.back()[i]));
            difference = std::max(difference, fabs(at.back()[i] - found[position * at.back().size() + i]));
        }
        worst = std::max(worst, difference / largest);  // NaN is never larger: `found` has none, see `all_of`
    }
    return worst;
}
