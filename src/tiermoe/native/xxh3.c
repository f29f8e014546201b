#include "xxh3.h"

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t PRIME32_1 = 0x9E3779B1U, PRIME32_2 = 0x85EBCA77U, PRIME32_3 = 0xC2B2AE3DU;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87U, PRIME64_2 = 0xC2B2AE3D27D4EB4FU, PRIME64_3 = 0x165667B19E3779F9U;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63U, PRIME64_5 = 0x27D4EB2F165667C5U;

/* Little-endian, as every processor that these kernels are built for. */
static uint64_t word(const uint8_t *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

static void take_in(uint64_t *accumulators, const uint8_t *stripe, const uint8_t *secret) {
    for (size_t i = 0; i < 8; i++) {
        const uint64_t value = word(stripe + 8 * i), key = value ^ word(secret + 8 * i);
        accumulators[i ^ 1] += value;
        accumulators[i] += (uint32_t)key * (key >> 32);
    }
}

static void scramble(uint64_t *accumulators) {
    const uint8_t *secret = SECRET + sizeof SECRET - XXH3_STRIPE;
    for (size_t i = 0; i < 8; i++) {
        accumulators[i] ^= accumulators[i] >> 47;
        accumulators[i] = (accumulators[i] ^ word(secret + 8 * i)) * PRIME32_1;
    }
}

void xxh3_begin(Xxh3 *state) {
    const uint64_t first[] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memset(state, 0, sizeof *state);
    memcpy(state->accumulators, first, sizeof first);
}

static void stripe_taken(Xxh3 *state, const uint8_t *stripe) {
    take_in(state->accumulators, stripe, SECRET + 8 * state->stripes);
    if (++state->stripes == XXH3_STRIPES) scramble(state->accumulators), state->stripes = 0;
}

void xxh3_update(Xxh3 *state, const void *bytes, size_t count) {
    const uint8_t *next = bytes, *end = next + count;
    uint8_t *waiting = state->bytes + XXH3_STRIPE;
    state->total += count;
    while (next < end && (state->waiting || (size_t)(end - next) <= XXH3_STRIPE)) { /* too little for a stripe from here */
        if (state->waiting == XXH3_STRIPE) {
            stripe_taken(state, waiting);
            memcpy(state->bytes, waiting, XXH3_STRIPE);
            state->waiting = 0;
            continue;
        }
        const size_t room = XXH3_STRIPE - state->waiting, left = (size_t)(end - next), some = left < room ? left : room;
        memcpy(waiting + state->waiting, next, some);
        state->waiting += some, next += some;
    }
    if (next == end) return;
    for (; (size_t)(end - next) > XXH3_STRIPE; next += XXH3_STRIPE) stripe_taken(state, next);
    memcpy(state->bytes, next - XXH3_STRIPE, XXH3_STRIPE);
    state->waiting = (size_t)(end - next);
    memcpy(waiting, next, state->waiting);
}

/* The product's two halves, folded. */
static uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t xxh3_digest(const Xxh3 *state) {
    uint64_t accumulators[8], result = state->total * PRIME64_1;
    memcpy(accumulators, state->accumulators, sizeof accumulators);
    take_in(accumulators, state->bytes + state->waiting, SECRET + sizeof SECRET - XXH3_STRIPE - 7);
    for (size_t i = 0; i < 4; i++)
        result += folded(accumulators[2 * i] ^ word(SECRET + 11 + 16 * i), accumulators[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
    result = (result ^ result >> 37) * 0x165667919E3779F9U;
    return result ^ result >> 32;
}
