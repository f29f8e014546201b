#include "moe_block.h"

#include "route.h"
#include "vector.h"

typedef struct {
    bf16 *logits, *inner, *outputs;
    int64_t *chosen;
    float *weights, *sums;
    const bf16 **rows;
    Expert *experts;
} Room;

/* The parts of the workspace, each on a line of its own. */
static size_t lay_out(Room *room, const Expert *expert, size_t count, size_t k, size_t threads, char *begin) {
    char *end = begin;
#define PART(field, n)        \
    room->field = (void *)end; \
    end += ((n) * sizeof *room->field + 63) / 64 * 64;
    PART(logits, count)
    PART(chosen, k)
    PART(weights, k)
    PART(rows, k)
    PART(experts, k)
    PART(inner, k * expert->second.columns)
    PART(outputs, k * expert->second.rows)
    PART(sums, experts_sums(expert, k, 1, threads))
#undef PART
    return (size_t)(end - begin);
}

size_t moe_block_workspace(const Expert *expert, size_t count, size_t k, size_t threads) {
    Room room;
    return lay_out(&room, expert, count, k, threads, NULL);
}

/* By ascending expert. */
static void sort(int64_t *chosen, float *weights, size_t k) {
    for (size_t i = 1; i < k; i++)
        for (size_t j = i; j && chosen[j] < chosen[j - 1]; j--) {
            const int64_t expert = chosen[j];
            const float weight = weights[j];
            chosen[j] = chosen[j - 1], weights[j] = weights[j - 1];
            chosen[j - 1] = expert, weights[j - 1] = weight;
        }
}

int moe_block_run(const MoeBlock *block, const bf16 *x, const bf16 *residual, void *workspace, bf16 *out, size_t threads) {
    Room room;
    const size_t k = block->k, columns = block->columns;
    lay_out(&room, block->experts, block->count, k, threads, workspace);
    route_logits(block->router, x, block->count, columns, room.logits);
    route_choose(room.logits, block->count, k, block->normalise, room.chosen, room.weights);
    sort(room.chosen, room.weights, k);
    for (size_t i = 0; i < k; i++) {
        room.experts[i] = block->experts[room.chosen[i]];
        if (!room.experts[i].first.codes) return 0;
        room.rows[i] = room.outputs + i * columns;
        if (block->round_weights) room.weights[i] = from_bf16(round_bf16(room.weights[i]));
    }
    experts_run(room.experts, k, x, 1, room.inner, room.sums, room.outputs, threads, OWN);
    experts_combine(room.rows, room.weights, k, columns, out);
    add_rows(out, residual, columns);
    return 1;
}
