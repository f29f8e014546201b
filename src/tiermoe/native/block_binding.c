/* The Python face of moe_block.h. */
#include "binding.h"
#include "moe_block.h"

/* Gives a block its experts, `table`; ValueError where there are more or fewer than its router's. */
static int take_block(const Py_buffer *table, MoeBlock *block) {
    block->experts = table->buf;
    if ((size_t)table->len == block->router.experts * sizeof(Expert)) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of %zu experts", table->len, block->router.experts);
    return 0;
}

static PyObject *block_workspace(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Py_buffer table;
    unsigned threads;
    size_t needed = 0;
    MoeBlock packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&y*nI", STRUCT(packed.router), &table, &tokens, &threads)) return NULL;
    if (take_block(&table, &packed)) needed = moe_block_workspace(&packed, (size_t)tokens, threads);
    PyBuffer_Release(&table);
    return needed ? PyLong_FromSize_t(needed) : NULL;
}

/* What the parts of a block's computation share: the block, its tokens and where they compute. */
typedef struct {
    MoeBlock block;
    const bf16 *x;
    size_t tokens;
    void *workspace;
    size_t threads;
} BlockCall;

static PyObject *block_call(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Py_buffer table;
    Address x, workspace;
    unsigned threads;
    BlockCall call;
    (void)self;
    memset(&call, 0, sizeof call);
    if (!PyArg_ParseTuple(args, "O&y*KnKI", STRUCT(call.block.router), &table, &x, &tokens, &workspace, &threads)) return NULL;
    const int fits = take_block(&table, &call.block);
    PyBuffer_Release(&table);
    if (!fits) return NULL;
    call.x = at(x), call.tokens = (size_t)tokens, call.workspace = at(workspace), call.threads = threads;
    return PyBytes_FromStringAndSize((const char *)&call, sizeof call);
}

static PyObject *block(PyObject *self, PyObject *args) {
    Address residual, out;
    size_t computed;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KK", STRUCT(call), &residual, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    computed = moe_block_run(&call.block, call.x, at(residual), call.tokens, call.workspace, at(out), call.threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(computed);
}

/* Each token's experts, as a list of lists. */
static PyObject *chosen_lists(const BlockCall *call) {
    const int64_t *chosen = moe_block_chosen(&call->block, call->tokens, call->workspace, call->threads);
    const size_t k = call->block.router.k;
    PyObject *lists = PyList_New((Py_ssize_t)call->tokens);
    for (size_t t = 0; lists && t < call->tokens; t++) {
        PyObject *row = PyList_New((Py_ssize_t)k);
        for (size_t i = 0; row && i < k; i++) {
            PyObject *expert = PyLong_FromLongLong(chosen[t * k + i]);
            if (expert)
                PyList_SetItem(row, (Py_ssize_t)i, expert);
            else
                Py_CLEAR(row);
        }
        if (row)
            PyList_SetItem(lists, (Py_ssize_t)t, row);
        else
            Py_CLEAR(lists);
    }
    return lists;
}

static PyObject *block_route(PyObject *self, PyObject *args) {
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&", STRUCT(call))) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_route(&call.block, call.x, call.tokens, call.workspace, call.threads);
    Py_END_ALLOW_THREADS
    return chosen_lists(&call);
}

static PyObject *block_chosen(PyObject *self, PyObject *args) {
    BlockCall call;
    (void)self;
    return PyArg_ParseTuple(args, "O&", STRUCT(call)) ? chosen_lists(&call) : NULL;
}

static PyObject *block_routed(PyObject *self, PyObject *args) {
    Address chosen, weights;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KK", STRUCT(call), &chosen, &weights)) return NULL;
    moe_block_routed(&call.block, at(chosen), at(weights), call.tokens, call.workspace, call.threads);
    Py_RETURN_NONE;
}

static PyObject *block_experts(PyObject *self, PyObject *args) {
    Py_ssize_t row;
    PyObject *list;
    size_t next;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O!n", STRUCT(call), &PyList_Type, &list, &row))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    int64_t experts[count ? count : 1];
    for (Py_ssize_t i = 0; i < count; i++) {
        experts[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
        if (experts[i] >= 0 && (size_t)experts[i] < call.block.router.experts) continue;
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no expert %lld", (long long)experts[i]);
    }
    Py_BEGIN_ALLOW_THREADS
    next = moe_block_experts(&call.block, call.x, call.tokens, call.workspace, call.threads, experts, (size_t)count, (size_t)row);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(next);
}

static PyObject *block_sum(PyObject *self, PyObject *args) {
    Address residual, out;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KK", STRUCT(call), &residual, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_sum(&call.block, at(residual), call.tokens, call.workspace, call.threads, at(out));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef block_methods[] = {
    {"block_workspace", block_workspace, METH_VARARGS, "block_workspace(router, experts, tokens, threads) -> bytes that block needs"},
    {"block_call", block_call, METH_VARARGS,
     "block_call(router, experts, x, tokens, workspace, threads) -> bytes of a BlockCall, valid as long as all of these live"},
    {"block_route", block_route, METH_VARARGS, "block_route(call) -> what each token chooses, in ascending order"},
    {"block_chosen", block_chosen, METH_VARARGS, "block_chosen(call) -> what each token chose last, as block_route"},
    {"block_routed", block_routed, METH_VARARGS, "block_routed(call, chosen, weights): a choice that is known"},
    {"block_experts", block_experts, METH_VARARGS, "block_experts(call, which, row) -> the next call's row, 0 at first"},
    {"block_sum", block_sum, METH_VARARGS, "block_sum(call, residual, out)"},
    {"block", block, METH_VARARGS, "block(call, residual, out) -> how many experts computed, 0 where a chosen one is not here"},
    {NULL, NULL, 0, NULL},
};
