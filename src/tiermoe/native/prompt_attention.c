#include "prompt_attention.h"

#include "kernels.h"
#include "kv_codes.h"
#include "team.h"

typedef struct {
    const Prompt *prompt;
    const Slabs *slabs;
    float *workspace;
    size_t blocks; /* of a key/value head */
} Job;

size_t prompt_blocks(size_t tokens, size_t heads, const Slabs *slabs) {
    return (tokens * (heads / slabs->kv_heads) + QUERY_ROWS - 1) / QUERY_ROWS;
}

size_t prompt_state(size_t tokens, size_t heads, const Slabs *slabs) {
    return slabs->kv_heads * prompt_blocks(tokens, heads, slabs) * rows_state(slabs->value_columns);
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
        return prompt->begin % TILE || prompt->begin % slabs->room || prompt->end - prompt->begin > slabs->room
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

void prompt_block(const Prompt *prompt, const Slabs *slabs, size_t kv_head, size_t block, float *workspace) {
    const size_t from = block * QUERY_ROWS;
    const size_t group = prompt->heads / slabs->kv_heads, rest = prompt->tokens * group - from;
    const Positions positions = slab_positions(slabs, prompt->slab, kv_head);
    bf16 transformed[QUERY_ROWS][MOST_HEAD_COLUMNS];
    QueryRows rows = {
        .count = rest < QUERY_ROWS ? rest : QUERY_ROWS,
        .scale = prompt->scale,
        .from = prompt->begin,
        .to = prompt->end,
        .more = prompt->end < prompt->first + prompt->tokens,
    };
    if (prompt->state) {
        const size_t before = kv_head * prompt_blocks(prompt->tokens, prompt->heads, slabs) + block;
        rows.state = prompt->state + before * rows_state(slabs->value_columns);
    }
    for (size_t r = 0; r < rows.count; r++) {
        const size_t token = (from + r) / group, head = kv_head * group + (from + r) % group;
        const size_t end = prompt->first + token + 1, at = token * prompt->heads + head;
        rows.queries[r] = prompt->query + at * slabs->key_columns;
        if (slabs->bits == 4) {
            hadamard_inverse(rows.queries[r], slabs->key_columns, transformed[r]);
            rows.queries[r] = transformed[r];
        }
        rows.out[r] = prompt->out + at * slabs->value_columns;
        rows.sinks[r] = prompt->sinks ? prompt->sinks + head : NULL;
        rows.begin[r] = window_begin(end - 1, prompt->window, prompt->chunked);
        rows.end[r] = end;
    }
    kernels->attend_rows(&positions, &rows, workspace);
    for (size_t r = 0; slabs->bits == 4 && !rows.more && r < rows.count; r++)
        hadamard_inverse(rows.out[r], slabs->value_columns, rows.out[r]);
}

static void attend_block(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t each = rows_workspace(job->slabs->key_columns, job->slabs->value_columns);
    prompt_block(job->prompt, job->slabs, task / job->blocks, task % job->blocks, job->workspace + thread * each);
}

void prompt_attend(const Prompt *prompt, const Slabs *slabs, void *workspace, size_t threads) {
    Job job = {prompt, slabs, workspace, prompt_blocks(prompt->tokens, prompt->heads, slabs)};
    const Phase phase = {NULL, attend_block, slabs->kv_heads * job.blocks};
    team_run(&phase, 1, &job, threads, TORCHS);
}
