// How quantized weights lie in memory: packings, what they are made of, and the kinds of blocks that they are made from.
//
// A panel of PANEL outputs has a head for each SUPER groups of GROUP inputs, and then these groups, each of scales and
// numbers. Four inputs of an output lie together. Of numbers of 4 bits, [4][PANEL][4] bytes, a byte has that of input
// `i` and, above it, that of input `i + 16`. A fifth bit is in [PANEL][4] bytes, bit `i / 4` of the byte of input `i % 4`;
// the fifth and the sixth are in [2][PANEL][4] bytes, in twos. Scales are those of ggml's kinds of blocks of the same name
// (ggml-common.h of llama.cpp); nothing of a block is lost or rounded.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr int PANEL = 32;  // outputs that are computed together
constexpr int GROUP = 32;  // inputs that share a scale
constexpr int SUPER = 8;   // groups that share a head

// ggml does not have three of them. Q8_32 is Q8_0 with scales in float32. INT4 is what other programs make of 4 bits: a block
// has a scale in float32, the number that is zero in 4 bytes, and 16 bytes for each group, as Q4_0's.
enum Packing : int32_t {
    Q8_32 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 4, Q5_1 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8, IQ4_NL = 9, IQ4_XS = 10, MXFP4 = 11,
    INT4_32 = 12, INT4_128 = 13
};
constexpr int PACKINGS = 14;

// bits of a number; bytes of a head and of a group's scales; what is taken from a number; whether something is added to
// each, and whether halves of a group have a scale of their own; bytes of a block, and its inputs
struct Layout { int bits, head, lead, raised; bool adds, halved; int block, inputs; };
constexpr Layout LAYOUTS[PACKINGS] = {
    {8, 0, 128, 0, false, false, 0, GROUP},    // of [32] scales in float32, which no block has
    {8, 0, 64, 0, false, false, 34, GROUP},    // of [32] scales in float16
    {4, 0, 64, 8, false, false, 18, GROUP},
    {4, 0, 128, 0, true, false, 20, GROUP},    // [32] scales, and [32] numbers that are added
    {5, 0, 64, 16, false, false, 22, GROUP},
    {5, 0, 128, 0, true, false, 24, GROUP},
    {4, 640, 0, 0, true, false, 144, 256},     // [2][32] in float16, and [SUPER][2][32] by which these are multiplied
    {5, 640, 0, 0, true, false, 176, 256},
    {6, 576, 0, 32, false, true, 210, 256},    // [32] in float16, and [SUPER][2][32], one for each half of a group
    {4, 0, 64, 0, false, false, 18, GROUP},    // numbers are places in IQ4
    {4, 320, 0, 0, false, false, 136, 256},    // [32] in float16, and [SUPER][32]; places in IQ4
    {4, 256, 0, 0, false, false, 17, GROUP},   // [SUPER][32] exponents; places in FP4
    {4, 1280, 0, 0, true, false, 24, GROUP},   // [SUPER][32] scales in float32, and [SUPER][32] bytes that are taken away
    {4, 320, 0, 0, true, false, 72, 128},      // the same, of four groups each
};
constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

constexpr bool is_int4(int packing) { return packing == INT4_32 || packing == INT4_128; }
constexpr bool is_placed(int packing) { return packing == IQ4_NL || packing == IQ4_XS || packing == MXFP4; }
constexpr int number_bytes(int packing) { return LAYOUTS[packing].bits * PANEL * GROUP / 8; }
constexpr int group_bytes(int packing) { return LAYOUTS[packing].lead + number_bytes(packing); }
static inline int groups_of(int inputs) { return (inputs + GROUP - 1) / GROUP; }
static inline size_t packed_bytes(int packing, int inputs) {  // of a panel
    const size_t groups = groups_of(inputs);
    return (groups + SUPER - 1) / SUPER * LAYOUTS[packing].head + groups * group_bytes(packing);
}

// The weights of output `lane` of a panel
void unpack(int packing, const uint8_t* panel, int lane, int inputs, float* to);
