/* The Python face of moe_block.h: the type `MoeBlock`, a layer's table of experts and the call that runs over it. */
#include <stdlib.h>
#include <string.h>

#include "binding.h"
#include "moe_block.h"

typedef struct {
    PyObject_HEAD
    size_t count;    /* of experts */
    Expert *forms;   /* of each precision, without addresses */
    Expert *experts; /* the first form where one is not here */
    MoeBlock block;  /* the router of the running call, over `experts` */
    const bf16 *x;
    size_t tokens, threads, row; /* row: of the results, the next free one */
    void *workspace;             /* NULL until it is given */
} Block;

static PyObject *block_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    Py_ssize_t count;
    Py_buffer forms;
    if (named && PyDict_Size(named)) return PyErr_Format(PyExc_TypeError, "MoeBlock takes no names");
    if (!PyArg_ParseTuple(args, "y*n", &forms, &count)) return NULL;
    const size_t form_count = (size_t)forms.len / sizeof(Expert);
    Block *block = NULL;
    if (count < 1)
        PyErr_Format(PyExc_ValueError, "a block has experts, not %zd", count);
    else if (!form_count || (size_t)forms.len % sizeof(Expert))
        PyErr_Format(PyExc_ValueError, "%zd bytes are no experts of %zu bytes", forms.len, sizeof(Expert));
    else
        block = (Block *)PyType_GenericAlloc(type, 0);
    if (block) {
        block->count = (size_t)count;
        block->forms = malloc((size_t)forms.len), block->experts = malloc(block->count * sizeof(Expert));
        if (block->forms && block->experts) {
            memcpy(block->forms, forms.buf, (size_t)forms.len);
            for (size_t e = 0; e < block->count; e++) block->experts[e] = block->forms[0];
            block->block = (MoeBlock){.experts = block->experts, .forms = block->forms, .form_count = form_count};
        } else {
            Py_CLEAR(block);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&forms);
    return (PyObject *)block;
}

static void block_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    free(((Block *)self)->experts);
    free(((Block *)self)->forms);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Whether the block has such an expert; else an exception is set. */
static int has(const Block *block, long long expert) {
    if (expert >= 0 && (size_t)expert < block->count) return 1;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "there is no expert %lld", expert);
    return 0;
}

static PyObject *block_place(PyObject *self, PyObject *args) {
    Block *block = (Block *)self;
    long long expert;
    Expert packed;
    if (!PyArg_ParseTuple(args, "LO&", &expert, STRUCT(packed)) || !has(block, expert)) return NULL;
    block->experts[expert] = packed;
    Py_RETURN_NONE;
}

static PyObject *block_remove(PyObject *self, PyObject *number) {
    Block *block = (Block *)self;
    const long long expert = PyLong_AsLongLong(number);
    if (!has(block, expert)) return NULL;
    block->experts[expert] = block->forms[0];
    Py_RETURN_NONE;
}

static PyObject *block_begin(PyObject *self, PyObject *args) {
    Block *block = (Block *)self;
    Py_ssize_t tokens;
    Address x;
    unsigned threads;
    Router router;
    if (!PyArg_ParseTuple(args, "O&KnI", STRUCT(router), &x, &tokens, &threads)) return NULL;
    if (router.experts != block->count)
        return PyErr_Format(PyExc_ValueError, "a router of %zu experts, a block of %zu", (size_t)router.experts, block->count);
    block->block.router = router, block->x = at(x), block->tokens = (size_t)tokens, block->threads = threads;
    block->workspace = NULL, block->row = 0;
    return PyLong_FromSize_t(moe_block_workspace(&block->block, block->tokens, block->threads));
}

/* Whether a call has begun and has its workspace; else an exception is set. */
static int runs(const Block *block) {
    if (!block->workspace) PyErr_SetString(PyExc_ValueError, "no call has begun");
    return block->workspace != NULL;
}

static PyObject *block_run(PyObject *self, PyObject *args) {
    Block *block = (Block *)self;
    Address workspace, residual, out;
    size_t computed;
    if (!PyArg_ParseTuple(args, "KKK", &workspace, &residual, &out)) return NULL;
    block->workspace = at(workspace);
    if (!runs(block)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    computed = moe_block_run(&block->block, block->x, at(residual), block->tokens, block->workspace, at(out), block->threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(computed);
}

/* Each token's experts, as a list of lists. */
static PyObject *block_chosen(PyObject *self, PyObject *none) {
    const Block *block = (Block *)self;
    (void)none;
    if (!runs(block)) return NULL;
    const int64_t *chosen = moe_block_chosen(&block->block, block->tokens, block->workspace, block->threads);
    const size_t k = block->block.router.k;
    PyObject *lists = PyList_New((Py_ssize_t)block->tokens);
    for (size_t t = 0; lists && t < block->tokens; t++) {
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
    Block *block = (Block *)self;
    Address workspace;
    if (!PyArg_ParseTuple(args, "K", &workspace)) return NULL;
    block->workspace = at(workspace);
    if (!runs(block)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_route(&block->block, block->x, block->tokens, block->workspace, block->threads);
    Py_END_ALLOW_THREADS
    return block_chosen(self, NULL);
}

static PyObject *block_routed(PyObject *self, PyObject *args) {
    Block *block = (Block *)self;
    Address workspace, chosen, weights;
    if (!PyArg_ParseTuple(args, "KKK", &workspace, &chosen, &weights)) return NULL;
    block->workspace = at(workspace);
    if (!runs(block)) return NULL;
    moe_block_routed(&block->block, at(chosen), at(weights), block->tokens, block->workspace, block->threads);
    Py_RETURN_NONE;
}

static PyObject *block_compute(PyObject *self, PyObject *list) {
    Block *block = (Block *)self;
    if (!runs(block)) return NULL;
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "experts are a list");
    const Py_ssize_t count = PyList_Size(list);
    int64_t experts[count ? count : 1];
    for (Py_ssize_t i = 0; i < count; i++) {
        experts[i] = PyLong_AsLongLong(PyList_GetItem(list, i));
        if (!has(block, experts[i])) return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    block->row = moe_block_experts(&block->block, block->x, block->tokens, block->workspace, block->threads, experts,
                                   (size_t)count, block->row);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *block_total(PyObject *self, PyObject *args) {
    Block *block = (Block *)self;
    Address residual, out;
    if (!PyArg_ParseTuple(args, "KK", &residual, &out) || !runs(block)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_sum(&block->block, at(residual), block->tokens, block->workspace, block->threads, at(out));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"place", block_place, METH_VARARGS, "place(expert, packed): the expert is here"},
    {"remove", block_remove, METH_O, "remove(expert): the expert is absent"},
    {"begin", block_begin, METH_VARARGS, "begin(router, x, tokens, threads) -> bytes of workspace that the call needs"},
    {"run", block_run, METH_VARARGS, "run(workspace, residual, out) -> how many experts computed, 0 where a chosen one is absent"},
    {"route", block_route, METH_VARARGS, "route(workspace) -> what each token chooses, in ascending order"},
    {"routed", block_routed, METH_VARARGS, "routed(workspace, chosen, weights): a choice that is known"},
    {"chosen", block_chosen, METH_NOARGS, "chosen() -> what each token has chosen, as route"},
    {"compute", block_compute, METH_O, "compute(experts): some of the chosen ones, which are here"},
    {"total", block_total, METH_VARARGS, "total(residual, out): what run writes, of the experts that have computed"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A MoE block for few tokens; see _native.pyi."},
    {Py_tp_new, block_new},
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"tiermoe.native._native.MoeBlock", sizeof(Block), 0, Py_TPFLAGS_DEFAULT, slots};

PyObject *moe_block_type(void) { return PyType_FromSpec(&spec); }
