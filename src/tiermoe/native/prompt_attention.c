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

const char *prompt_misfit(const Prompt *prompt, const Slabs *slabs) {
    const size_t end = prompt->first + prompt->tokens, columns[] = {slabs->key_columns, slabs->value_columns};
    for (int i = 0; i < 2; i++)
        if (!columns[i] || columns[i] % 32 || columns[i] > MOST_HEAD_COLUMNS)
            return "heads of columns that are no multiple of 32, or more than 512";
    if (!prompt->heads || prompt->heads % slabs->kv_heads) return "heads that are no multiple of the key/value heads";
    if (prompt->slab >= slabs->slabs) return "a slab that is not there";
    if (!slabs->ring) return end > slabs->room ? "positions beyond the slab's room" : NULL;
    if (!prompt->window) return "a ring for a layer without a window";
    return end > slabs->room && prompt->window + prompt->tokens - 1 > slabs->room
               ? "a ring with less room than the window and the prompt's tokens take"
               : NULL;
}

size_t prompt_workspace(const Slabs *slabs, size_t threads) {
    return threads * rows_workspace(slabs->key_columns, slabs->value_columns) * sizeof(float);
}

void prompt_block(const Prompt *prompt, const Positions *positions, size_t kv_head, size_t kv_heads, size_t block,
                  float *workspace) {
    const size_t from = block * QUERY_ROWS;
    const size_t group = prompt->heads / kv_heads, rest = prompt->tokens * group - from;
    bf16 transformed[QUERY_ROWS][MOST_HEAD_COLUMNS];
    QueryRows rows = {.count = rest < QUERY_ROWS ? rest : QUERY_ROWS, .scale = prompt->scale};
    for (size_t r = 0; r < rows.count; r++) {
        const size_t token = (from + r) / group, head = kv_head * group + (from + r) % group;
        const size_t end = prompt->first + token + 1, at = token * prompt->heads + head;
        rows.queries[r] = prompt->query + at * positions->key_columns;
        if (positions->bits == 4) {
            hadamard_inverse(rows.queries[r], positions->key_columns, transformed[r]);
            rows.queries[r] = transformed[r];
        }
        rows.out[r] = prompt->out + at * prompt->out_stride;
        rows.sinks[r] = prompt->sinks ? prompt->sinks + head : NULL;
        rows.begin[r] = window_begin(end - 1, prompt->window, prompt->chunked);
        rows.end[r] = end;
    }
    kernels->attend_rows(positions, &rows, workspace);
    for (size_t r = 0; positions->bits == 4 && r < rows.count; r++)
        hadamard_inverse(rows.out[r], positions->value_columns, rows.out[r]);
}

static void attend_block(void *data, size_t thread, size_t task) {
    const Job *job = data;
    const size_t each = rows_workspace(job->slabs->key_columns, job->slabs->value_columns);
    const size_t kv_head = task / job->blocks;
    const Positions positions = slab_positions(job->slabs, job->prompt->slab, kv_head, 0);
    prompt_block(job->prompt, &positions, kv_head, job->slabs->kv_heads, task % job->blocks, job->workspace + thread * each);
}

void prompt_attend(const Prompt *prompt, const Slabs *slabs, void *workspace, size_t threads) {
    Job job = {prompt, slabs, workspace, prompt_blocks(prompt->tokens, prompt->heads, slabs)};
    const Phase phase = {NULL, attend_block, slabs->kv_heads * job.blocks};
    team_run(&phase, 1, &job, threads, TORCHS);
}
