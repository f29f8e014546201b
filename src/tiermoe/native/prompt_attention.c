#include "prompt_attention.h"

#include "attention_tiles.h"
#include "kernels.h"
#include "team.h"

typedef struct {
    const Prompt *prompt;
    const Slabs *slabs;
    float *workspace;
    size_t blocks; /* of a key/value head's queries */
} Job;

/* Of a key/value head's queries. */
static size_t blocks_of(size_t tokens, size_t heads, const Slabs *slabs) {
    return (tokens * (heads / slabs->kv_heads) + QUERY_ROWS - 1) / QUERY_ROWS;
}

size_t prompt_state(size_t tokens, size_t heads, const Slabs *slabs) {
    return slabs->kv_heads * blocks_of(tokens, heads, slabs) * rows_state(slabs->value_columns);
}

const char *prompt_misfit(const Prompt *prompt, const Slabs *slabs) {
    const size_t end = prompt->first + prompt->tokens, columns[] = {slabs->key_columns, slabs->value_columns};
    for (int i = 0; i < 2; i++)
        if (!columns[i] || columns[i] % 32 || columns[i] > MOST_HEAD_COLUMNS)
            return "heads of columns that are no multiple of 32, or more than 256";
    if (!prompt->heads || prompt->heads % slabs->kv_heads) return "heads that are no multiple of the key/value heads";
    if (prompt->slab >= slabs->slabs) return "a slab that is not there";
    if (prompt->begin >= prompt->end || prompt->end > end) return "a piece of no positions, or of more than there are";
    if (prompt->state)
        return prompt->begin % QUERY_TILE || prompt->begin % slabs->room || prompt->end - prompt->begin > slabs->room
                   ? "a piece that is larger than the slab's room, or begins at no multiple of it"
                   : NULL;
    if (prompt->begin || prompt->end < end) return "pieces of positions without a state";
    if (!slabs->ring) return end > slabs->room ? "positions beyond the slab's room" : NULL;
    if (!prompt->window) return "a ring for a layer without a window";
    return end > slabs->room && prompt->window + prompt->tokens - 1 > slabs->room
               ? "a ring with less room than the window and the prompt's tokens take"
               : NULL;
}

size_t prompt_workspace(const Slabs *slabs, size_t threads) {
    return threads * rows_workspace(slabs->key_columns, slabs->value_columns) * sizeof(float);
}

/* A block: queries of a group's heads, token by token. */
static void attend_block(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const Prompt *prompt = job->prompt;
    const Slabs *slabs = job->slabs;
    const size_t kv_head = task / job->blocks, from = task % job->blocks * QUERY_ROWS;
    const size_t group = prompt->heads / slabs->kv_heads, rest = prompt->tokens * group - from;
    const Positions positions = slab_positions(slabs, prompt->slab, kv_head);
    QueryRows rows = {
        .count = rest < QUERY_ROWS ? rest : QUERY_ROWS,
        .scale = prompt->scale,
        .from = prompt->begin,
        .to = prompt->end,
        .more = prompt->end < prompt->first + prompt->tokens,
        .state = prompt->state ? prompt->state + task * rows_state(slabs->value_columns) : NULL,
    };
    for (size_t r = 0; r < rows.count; r++) {
        const size_t token = (from + r) / group, head = kv_head * group + (from + r) % group;
        const size_t end = prompt->first + token + 1, at = token * prompt->heads + head;
        rows.queries[r] = prompt->query + at * slabs->key_columns;
        rows.out[r] = prompt->out + at * slabs->value_columns;
        rows.sinks[r] = prompt->sinks ? prompt->sinks + head : NULL;
        rows.begin[r] = window_begin(end - 1, prompt->window, prompt->chunked);
        rows.end[r] = end;
    }
    const size_t each = rows_workspace(slabs->key_columns, slabs->value_columns);
    kernels->attend_rows(&positions, &rows, job->workspace + thread * each);
}

void prompt_attend(const Prompt *prompt, const Slabs *slabs, void *workspace, size_t threads) {
    Job job = {prompt, slabs, workspace, blocks_of(prompt->tokens, prompt->heads, slabs)};
    const Phase phase = {NULL, attend_block, slabs->kv_heads * job.blocks};
    team_run(&phase, 1, &job, threads, TORCHS);
}
