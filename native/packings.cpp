// Packs blocks of ggml's kinds into panels, and unpacks weights. Neither rounds: a weight is what ggml makes of its block.
#include "packings.h"
#include <algorithm>
#include <cstring>
#include "step.h"

namespace {

float half_of(const uint8_t* at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float size;
    memcpy(&size, &wide, 4);
    size *= 0x1p112f;  // right for subnormal numbers, too
    memcpy(&wide, &size, 4);
    if (size >= 0x1p16f) wide |= 0x7f800000;  // infinity and NaN
    wide |= (uint32_t)(bits & 0x8000) << 16;
    memcpy(&size, &wide, 4);
    return size;
}

float power_of(uint8_t exponent) {  // half of 2^(exponent - 127)
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// A group of a panel, as it is packed
struct Place {
    uint8_t *head, *lead, *numbers;
};
Place place_of(int packing, uint8_t* panel, int group) {
    const Layout& l = LAYOUTS[packing];
    uint8_t* head = panel + (size_t)(group / SUPER) * (l.head + SUPER * group_bytes(packing));
    uint8_t* lead = head + l.head + (size_t)(group % SUPER) * group_bytes(packing);
    return {head, lead, lead + l.lead};
}

// Four inputs of an output are moved as one word: nothing passes from one of its bytes to another.
uint32_t word_at(const uint8_t* at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}
void put_word(uint8_t* at, uint32_t word) { memcpy(at, &word, 4); }

constexpr int ROW = PANEL * 4, FOURS = GROUP / 4;

void numbers_of(int bits, const uint8_t* numbers, int lane, int8_t* to) {
    const uint8_t *own = numbers + lane * 4, *high = own + PANEL * GROUP / 2;
    for (int i = 0; i < FOURS; i++) {
        uint32_t four = bits == 8 ? word_at(own + i * ROW) : word_at(own + i % 4 * ROW) >> i / 4 * 4 & 0x0f0f0f0f;
        if (bits == 5) four |= (word_at(high) >> i & 0x01010101) << 4;
        if (bits == 6) four |= (word_at(high + i / 4 * ROW) >> 2 * (i % 4) & 0x03030303) << 4;
        memcpy(to + 4 * i, &four, 4);
    }
}

void put_numbers(int bits, const uint8_t* from, int lane, uint8_t* numbers) {
    uint8_t *own = numbers + lane * 4, *high = own + PANEL * GROUP / 2;
    uint32_t fours[FOURS], upper[2] = {0, 0};
    for (int i = 0; i < FOURS; i++) fours[i] = word_at(from + 4 * i);
    if (bits == 8) {
        for (int i = 0; i < FOURS; i++) put_word(own + i * ROW, fours[i]);
        return;
    }
    for (int i = 0; i < 4; i++) put_word(own + i * ROW, (fours[i] & 0x0f0f0f0f) | (fours[i + 4] & 0x0f0f0f0f) << 4);
    if (bits == 5) {
        for (int i = 0; i < FOURS; i++) upper[0] |= (fours[i] >> 4 & 0x01010101) << i;
        put_word(high, upper[0]);
    } else if (bits == 6) {
        for (int i = 0; i < FOURS; i++) upper[i / 4] |= (fours[i] >> 4 & 0x03030303) << 2 * (i % 4);
        for (int i = 0; i < 2; i++) put_word(high + i * ROW, upper[i]);
    }
}

// The numbers of group `g` of a block of several
void take_numbers(int packing, const uint8_t* block, int g, uint8_t* to) {
    const uint8_t *low = block, *high = nullptr;
    switch (packing) {
        case Q8_0: memcpy(to, block + 2, GROUP); return;
        case Q4_0: case IQ4_NL: low += 2; break;
        case Q4_1: low += 4; break;
        case Q5_0: low += 6, high = block + 2; break;
        case Q5_1: low += 8, high = block + 4; break;
        case MXFP4: low += 1; break;
        case IQ4_XS: case INT4_32: case INT4_128: low += 8 + 16 * g; break;
        case Q4_K: case Q5_K:
            low += (packing == Q4_K ? 16 : 48) + 32 * (g / 2);
            for (int i = 0; i < GROUP; i++) {
                to[i] = low[i] >> g % 2 * 4 & 15;
                if (packing == Q5_K) to[i] |= (block[16 + i] >> g & 1) << 4;
            }
            return;
        default:  // Q6_K: of each 128 inputs, two groups are low, and two are above them
            low += 64 * (g / 4) + 32 * (g % 2), high = block + 128 + 32 * (g / 4);
            for (int i = 0; i < GROUP; i++) to[i] = (low[i] >> g % 4 / 2 * 4 & 15) | (high[i] >> g % 4 * 2 & 3) << 4;
            return;
    }
    for (int i = 0; i < GROUP / 2; i++) to[i] = low[i] & 15, to[i + GROUP / 2] = low[i] >> 4;
    if (!high) return;
    uint32_t fifth;
    memcpy(&fifth, high, 4);
    for (int i = 0; i < GROUP; i++) to[i] |= (fifth >> i & 1) << 4;
}

// The scales of a block, as those of group `g` of a head
void take_scales(int packing, const uint8_t* block, int g, int lane, const Place& to) {
    const Layout& l = LAYOUTS[packing];
    if (packing == MXFP4) return (void)(to.head[g * PANEL + lane] = block[0]);
    if (is_int4(packing)) {
        const int own = g * GROUP / l.inputs * PANEL + lane, all = SUPER * GROUP / l.inputs * PANEL;
        memcpy(to.head + 4 * own, block, 4);
        to.head[4 * all + own] = block[4];
        return;
    }
    if (!l.head) {
        memcpy(to.lead + 2 * lane, block, 2);
        if (l.adds) memcpy(to.lead + 2 * PANEL + 2 * lane, block + 2, 2);
        return;
    }
    memcpy(to.head + 2 * lane, block + (packing == Q6_K ? 208 : 0), 2);
    if (packing == Q6_K) {
        for (int half = 0; half < 2; half++) to.head[64 + (2 * g + half) * PANEL + lane] = block[192 + 2 * g + half];
    } else if (packing == IQ4_XS) {
        const int low = block[4 + g / 2] >> g % 2 * 4 & 15, high = (block[2] | block[3] << 8) >> 2 * g & 3;
        to.head[64 + g * PANEL + lane] = (uint8_t)((low | high << 4) - 32);
    } else {  // six bits each of a scale and of what is taken away
        memcpy(to.head + 64 + 2 * lane, block + 2, 2);
        const uint8_t* six = block + 4;
        const int scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
        const int taken = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
        to.head[128 + 2 * g * PANEL + lane] = (uint8_t)scale;
        to.head[128 + (2 * g + 1) * PANEL + lane] = (uint8_t)taken;
    }
}

}  // namespace

void unpack(int packing, const uint8_t* panel, int lane, int inputs, float* to) {
    const Layout& l = LAYOUTS[packing];
    for (int group = 0; group < groups_of(inputs); group++) {
        const int g = group % SUPER;
        const Place at = place_of(packing, const_cast<uint8_t*>(panel), group);
        float scales[2], added = 0.0f;
        const int own = g * GROUP / l.inputs * PANEL + lane;
        if (packing == Q8_32) memcpy(scales, at.lead + 4 * lane, 4);
        else if (is_int4(packing)) memcpy(scales, at.head + 4 * own, 4);
        else if (packing == MXFP4) scales[0] = power_of(at.head[g * PANEL + lane]);
        else scales[0] = half_of((l.head ? at.head : at.lead) + 2 * lane);
        scales[1] = scales[0];
        if (l.adds && !l.head) added = half_of(at.lead + 2 * PANEL + 2 * lane);
        const int taken = is_int4(packing) ? at.head[4 * SUPER * GROUP / l.inputs * PANEL + own] : l.raised;
        if (l.adds && l.head && !is_int4(packing)) {
            added = -(half_of(at.head + 64 + 2 * lane) * at.head[128 + (2 * g + 1) * PANEL + lane]);
            scales[0] = scales[1] = scales[0] * at.head[128 + 2 * g * PANEL + lane];
        }
        if (packing == IQ4_XS) scales[0] = scales[1] = scales[0] * (int8_t)at.head[64 + g * PANEL + lane];
        for (int half = 0; half < 2 && l.halved; half++) scales[half] *= (int8_t)at.head[64 + (2 * g + half) * PANEL + lane];
        int8_t numbers[GROUP];
        numbers_of(l.bits, at.numbers, lane, numbers);
        const int8_t* places = packing == MXFP4 ? FP4 : IQ4;
        for (int i = 0; i < GROUP && is_placed(packing); i++) numbers[i] = places[numbers[i]];
        float made[GROUP];
        for (int half = 0; half < 2; half++)
            for (int i = half * GROUP / 2; i < (half + 1) * GROUP / 2; i++) made[i] = scales[half] * (numbers[i] - taken) + added;
        memcpy(to + group * GROUP, made, std::min(GROUP, inputs - group * GROUP) * sizeof(float));
    }
}

extern "C" {

int64_t triolet_packed_bytes(int32_t packing, int32_t inputs) { return (int64_t)packed_bytes(packing, inputs); }

void triolet_pack(int32_t packing, const uint8_t* blocks, int32_t outputs, int32_t inputs, uint8_t* to) {
    const Layout& l = LAYOUTS[packing];
    const size_t of_row = (size_t)inputs / l.inputs * l.block, of_panel = packed_bytes(packing, inputs);
    const int groups = groups_of(inputs), together = l.inputs / GROUP;
    for (int first = 0; first < outputs; first += PANEL) {
        uint8_t* panel = to + first / PANEL * of_panel;
        memset(panel, 0, of_panel);  // here: it is in the caches when it is filled
        for (int group = 0; group < groups; group++) {
            const Place at = place_of(packing, panel, group);
            for (int lane = 0; lane < PANEL && first + lane < outputs; lane++) {
                uint8_t numbers[GROUP];
                const uint8_t* block = blocks + (first + lane) * of_row + (size_t)(group / together) * l.block;
                take_scales(packing, block, group % SUPER, lane, at);
                take_numbers(packing, block, group % together, numbers);
                put_numbers(l.bits, numbers, lane, at.numbers);
            }
        }
    }
}

void triolet_unpack(int32_t packing, const uint8_t* panels, int32_t inputs, const int64_t* outputs, int64_t count, float* to) {
    const size_t of_panel = packed_bytes(packing, inputs);
    for (int64_t i = 0; i < count; i++)
        unpack(packing, panels + outputs[i] / PANEL * of_panel, (int)(outputs[i] % PANEL), inputs, to + i * inputs);
}

}  // extern "C"
