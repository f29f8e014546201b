/* The Python face: addresses and sizes in, nothing out. Whoever calls holds the tensors and checks their shapes; a packed
 * matrix, expert or attention layer is kept by Python as the bytes of its struct. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "expert.h"
#include "hqq.h"
#include "moe_block.h"
#include "norm.h"
#include "product.h"
#include "route.h"
#include "widen.h"

typedef unsigned long long Address;

static void *at(Address address) { return (void *)(uintptr_t)address; }

static PyObject *supported(PyObject *self, PyObject *none) {
    (void)self, (void)none;
#if defined(__x86_64__)
    __builtin_cpu_init();
    return PyBool_FromLong(__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl"));
#else
    Py_RETURN_FALSE;
#endif
}

static PyObject *join_team(PyObject *self, PyObject *args) {
    const char *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    return PyBool_FromLong(team_join(path));
}

static PyObject *matrix(PyObject *self, PyObject *args) {
    Address codes, scales;
    Py_ssize_t rows, columns, group;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnn", &codes, &scales, &rows, &columns, &group)) return NULL;
    const Int4 packed = {at(codes), at(scales), (size_t)rows, (size_t)columns, (size_t)group};
    return PyBytes_FromStringAndSize((const char *)&packed, sizeof packed);
}

/* Reads a struct of `size` bytes that Python keeps; ValueError for another size. */
static int take(const char *bytes, Py_ssize_t length, void *into, size_t size) {
    if ((size_t)length != size) {
        PyErr_Format(PyExc_ValueError, "expected %zu bytes, got %zd", size, length);
        return 0;
    }
    memcpy(into, bytes, size);
    return 1;
}

static PyObject *product(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    Address x, sums, out;
    unsigned threads;
    int torchs;
    Int4 packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KnKKIp", &bytes, &length, &x, &tokens, &sums, &out, &threads, &torchs)) return NULL;
    if (!take(bytes, length, &packed, sizeof packed)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    product_run(&packed, at(x), (size_t)tokens, at(sums), at(out), threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Lists each expert in `bytes` with its tokens: `counts` says how many consecutive rows of x each has; None: all have the
 * same `rows`. To be freed; NULL with an exception where they do not fit. */
static Share *shares_of(const char *bytes, Py_ssize_t length, PyObject *counts, size_t rows) {
    const size_t experts = (size_t)length / sizeof(Expert);
    if (length == 0 || length % (Py_ssize_t)sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not whole experts of %zu", length, sizeof(Expert)), NULL;
    if (counts != Py_None && (!PyList_Check(counts) || (size_t)PyList_GET_SIZE(counts) != experts))
        return PyErr_Format(PyExc_ValueError, "counts must be None or a list of %zu", experts), NULL;
    Share *shares = PyMem_RawMalloc(experts * sizeof *shares);
    if (!shares) return PyErr_NoMemory(), NULL;
    size_t from = 0, to = 0;
    for (size_t e = 0; e < experts; e++) {
        const size_t tokens = counts == Py_None ? rows : PyLong_AsSize_t(PyList_GET_ITEM(counts, (Py_ssize_t)e));
        memcpy(&shares[e].expert, bytes + e * sizeof(Expert), sizeof(Expert));
        shares[e].from = from, shares[e].to = to, shares[e].tokens = tokens;
        to += tokens;
        if (counts != Py_None) from += tokens;
    }
    if (!PyErr_Occurred() && counts != Py_None && from != rows)
        PyErr_Format(PyExc_ValueError, "counts of %zu rows in all for %zu rows", from, rows);
    if (!PyErr_Occurred()) return shares;
    PyMem_RawFree(shares);
    return NULL;
}

static PyObject *experts(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, rows;
    PyObject *counts;
    Address x, inner, sums, out;
    unsigned threads;
    int torchs;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#OKnKKKIp", &bytes, &length, &counts, &x, &rows, &inner, &sums, &out, &threads, &torchs))
        return NULL;
    Share *shares = shares_of(bytes, length, counts, (size_t)rows);
    if (!shares) return NULL;
    const size_t count = (size_t)length / sizeof(Expert), results = shares[count - 1].to + shares[count - 1].tokens;
    Py_BEGIN_ALLOW_THREADS
    experts_run(shares, count, at(x), (size_t)rows, results, at(inner), at(sums), at(out), threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
    PyMem_RawFree(shares);
    Py_RETURN_NONE;
}

static PyObject *combine(PyObject *self, PyObject *args) {
    PyObject *rows, *weights;
    Py_ssize_t columns;
    Address out;
    const bf16 *addresses[MOST_EXPERTS];
    float factors[MOST_EXPERTS];
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!nK", &PyList_Type, &rows, &PyList_Type, &weights, &columns, &out)) return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(rows);
    if (count > MOST_EXPERTS || PyList_GET_SIZE(weights) != count)
        return PyErr_Format(PyExc_ValueError, "%zd rows and %zd weights: at most %d of each, as many of one as of the other",
                            count, PyList_GET_SIZE(weights), MOST_EXPERTS);
    for (Py_ssize_t i = 0; i < count; i++) {
        addresses[i] = at(PyLong_AsUnsignedLongLong(PyList_GET_ITEM(rows, i)));
        factors[i] = (float)PyFloat_AsDouble(PyList_GET_ITEM(weights, i));
    }
    if (PyErr_Occurred()) return NULL;
    experts_combine(addresses, factors, (size_t)count, (size_t)columns, at(out));
    Py_RETURN_NONE;
}

static PyObject *combine_many(PyObject *self, PyObject *args) {
    Address addresses, weights, out;
    Py_ssize_t tokens, k, columns;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnnKI", &addresses, &weights, &tokens, &k, &columns, &out, &threads)) return NULL;
    if (k < 1 || k > MOST_EXPERTS) return PyErr_Format(PyExc_ValueError, "%zd experts of a token: 1 to %d", k, MOST_EXPERTS);
    Py_BEGIN_ALLOW_THREADS
    experts_combine_many(at(addresses), at(weights), (size_t)tokens, (size_t)k, (size_t)columns, at(out), threads, TORCHS);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *logits(PyObject *self, PyObject *args) {
    Address weight, x, out;
    Py_ssize_t experts, columns, tokens;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnnK", &weight, &x, &tokens, &experts, &columns, &out)) return NULL;
    for (Py_ssize_t t = 0; t < tokens; t++)
        route_logits(at(weight), (bf16 *)at(x) + t * columns, (size_t)experts, (size_t)columns, (bf16 *)at(out) + t * experts);
    Py_RETURN_NONE;
}

static PyObject *choose(PyObject *self, PyObject *args) {
    Address logits, chosen, weights;
    Py_ssize_t experts, k, tokens;
    int normalise;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnnpKK", &logits, &tokens, &experts, &k, &normalise, &chosen, &weights)) return NULL;
    for (Py_ssize_t t = 0; t < tokens; t++)
        route_choose((bf16 *)at(logits) + t * experts, (size_t)experts, (size_t)k, normalise, (int64_t *)at(chosen) + t * k,
                     (float *)at(weights) + t * k);
    Py_RETURN_NONE;
}

/* Whether `table` holds `count` experts, more than k. */
static int is_table(const Py_buffer *table, Py_ssize_t count, Py_ssize_t k) {
    if (count > 0 && k > 0 && k <= count && k <= MOST_EXPERTS && table->len == count * (Py_ssize_t)sizeof(Expert)) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of %zd experts, %zd of which are chosen", table->len, count, k);
    return 0;
}

static PyObject *block_workspace(PyObject *self, PyObject *args) {
    Py_buffer table;
    Py_ssize_t count, k, tokens;
    unsigned threads;
    size_t bytes = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnnI", &table, &count, &k, &tokens, &threads)) return NULL;
    if (is_table(&table, count, k))
        bytes = moe_block_workspace(table.buf, (size_t)count, (size_t)k, (size_t)tokens, threads);
    PyBuffer_Release(&table);
    return bytes ? PyLong_FromSize_t(bytes) : NULL;
}

static PyObject *block(PyObject *self, PyObject *args) {
    Py_buffer table;
    Py_ssize_t count, k, columns, tokens;
    Address router, x, residual, workspace, out;
    unsigned threads;
    int normalise, round_weights, fits;
    size_t computed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ky*nnnppKKnKKI", &router, &table, &count, &k, &columns, &normalise, &round_weights, &x,
                          &residual, &tokens, &workspace, &out, &threads))
        return NULL;
    if ((fits = is_table(&table, count, k))) {
        const MoeBlock packed = {at(router), table.buf, (size_t)count, (size_t)k, (size_t)columns, normalise, round_weights};
        Py_BEGIN_ALLOW_THREADS
        computed = moe_block_run(&packed, at(x), at(residual), (size_t)tokens, at(workspace), at(out), threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&table);
    return fits ? PyLong_FromSize_t(computed) : NULL;
}

static PyObject *widen_codes(PyObject *self, PyObject *args) {
    Address pairs, ladders, codes;
    Py_ssize_t count, run;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnK", &pairs, &ladders, &count, &run, &codes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    widen(at(pairs), at(ladders), (size_t)count, (size_t)run, at(codes));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *solve_hqq(PyObject *self, PyObject *args) {
    Address weights, thresholds, codes, scale, offset, workspace, shrunk;
    Py_ssize_t rows, columns, group, block, steps, floats;
    unsigned threads;
    float largest;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnnnfKnKKKKnKI", &weights, &rows, &columns, &group, &block, &largest, &thresholds, &steps,
                          &codes, &scale, &offset, &workspace, &floats, &shrunk, &threads))
        return NULL;
    const Hqq job = {at(weights), (size_t)rows, (size_t)columns, (size_t)group, (size_t)block, largest, at(thresholds),
                     (size_t)steps, at(codes), at(scale), at(offset), at(workspace), at(shrunk)};
    if (hqq_workspace(&job, threads) > (size_t)floats)
        return PyErr_Format(PyExc_ValueError, "hqq needs a workspace of %zu floats", hqq_workspace(&job, threads));
    Py_BEGIN_ALLOW_THREADS
    hqq_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *self, PyObject *args) {
    Address x, weight, out;
    float epsilon;
    Py_ssize_t rows, width;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKfnnKI", &x, &weight, &epsilon, &rows, &width, &out, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    norm_run(at(x), at(weight), epsilon, (size_t)rows, (size_t)width, at(out), threads, TORCHS);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *attention(PyObject *self, PyObject *args) {
    const char *matrices[4];
    Py_ssize_t lengths[4], norm_width, heads, kv_heads, head_columns;
    Address before, after, query, key, biases[4];
    Attention layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#y#y#y#(KKKK)KKKKnnnnff", &matrices[0], &lengths[0], &matrices[1], &lengths[1],
                          &matrices[2], &lengths[2], &matrices[3], &lengths[3], &biases[0], &biases[1], &biases[2],
                          &biases[3], &before, &after, &query, &key, &norm_width, &heads, &kv_heads, &head_columns,
                          &layer.epsilon, &layer.scale))
        return NULL;
    layer.query_bias = at(biases[0]), layer.key_bias = at(biases[1]);
    layer.value_bias = at(biases[2]), layer.output_bias = at(biases[3]);
    Int4 *parts[] = {&layer.query, &layer.key, &layer.value, &layer.output};
    for (int i = 0; i < 4; i++)
        if (!take(matrices[i], lengths[i], parts[i], sizeof(Int4))) return NULL;
    layer.norm_before = at(before), layer.norm_after = at(after);
    layer.norm_query = at(query), layer.norm_key = at(key);
    layer.norm_width = (size_t)norm_width, layer.heads = (size_t)heads;
    layer.kv_heads = (size_t)kv_heads, layer.head_columns = (size_t)head_columns;
    return PyBytes_FromStringAndSize((const char *)&layer, sizeof layer);
}

static PyObject *workspace(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, sequences, positions;
    unsigned threads;
    Attention layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nnI", &bytes, &length, &sequences, &positions, &threads)) return NULL;
    if (!take(bytes, length, &layer, sizeof layer)) return NULL;
    return PyLong_FromSize_t(attention_workspace(&layer, (size_t)sequences, (size_t)positions, threads));
}

static PyObject *attend(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, sequences, room, positions;
    Address workspace, x, cos, sin, first, keys, values, out, normed;
    int one_position;
    unsigned threads;
    Attention layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KnKKKpKKKnnKKI", &bytes, &length, &workspace, &sequences, &x, &cos, &sin, &one_position,
                          &first, &keys, &values, &room, &positions, &out, &normed, &threads))
        return NULL;
    if (!take(bytes, length, &layer, sizeof layer)) return NULL;
    const Step step = {(size_t)sequences, at(x), at(cos), at(sin), one_position, at(first), at(keys), at(values), (size_t)room,
                       (size_t)positions, at(out), at(normed)};
    Py_BEGIN_ALLOW_THREADS
    attention_run(&layer, &step, at(workspace), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *sums(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, rows, results;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nnI", &bytes, &length, &rows, &results, &threads)) return NULL;
    if (length == sizeof(Int4)) return PyLong_FromSize_t(sizeof(float) * sums_room((const Int4 *)bytes, (size_t)rows, threads));
    if (length != sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are neither a matrix nor an expert", length);
    return PyLong_FromSize_t(sizeof(float) * experts_sums((const Expert *)bytes, (size_t)rows, (size_t)results, threads));
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "supported() -> whether this machine has AVX-512 with BF16 and VBMI"},
    {"join_team", join_team, METH_VARARGS, "join_team(path) -> whether the loaded OpenMP runtime at path can be used"},
    {"matrix", matrix, METH_VARARGS, "matrix(codes, scales, rows, columns, group) -> bytes of an Int4"},
    {"product", product, METH_VARARGS, "product(matrix, x, tokens, sums, out, threads, torchs)"},
    {"experts", experts, METH_VARARGS, "experts(experts, counts, x, rows, inner, sums, out, threads, torchs)"},
    {"combine", combine, METH_VARARGS, "combine(rows, weights, columns, out)"},
    {"combine_many", combine_many, METH_VARARGS, "combine_many(addresses, weights, tokens, k, columns, out, threads)"},
    {"logits", logits, METH_VARARGS, "logits(weight, x, tokens, experts, columns, out)"},
    {"choose", choose, METH_VARARGS, "choose(logits, tokens, experts, k, normalise, chosen, weights)"},
    {"block_workspace", block_workspace, METH_VARARGS, "block_workspace(experts, count, k, tokens, threads) -> bytes that block needs"},
    {"block", block, METH_VARARGS,
     "block(router, experts, count, k, columns, normalise, round_weights, x, residual, tokens, workspace, out, threads)"
     " -> how many experts computed, 0 where a chosen one is not here"},
    {"hqq", solve_hqq, METH_VARARGS,
     "hqq(weights, rows, columns, group, block, largest, thresholds, steps, codes, scale, offset, workspace, floats,"
     " shrunk, threads)"},
    {"norm", norm, METH_VARARGS, "norm(x, weight, epsilon, rows, width, out, threads)"},
    {"attention", attention, METH_VARARGS,
     "attention(query, key, value, output, biases, norm_before, norm_after, norm_query, norm_key, norm_width, heads, kv_heads,"
     " head_columns, epsilon, scale) -> bytes of an Attention"},
    {"workspace", workspace, METH_VARARGS, "workspace(attention, sequences, positions, threads) -> bytes that attend needs"},
    {"attend", attend, METH_VARARGS,
     "attend(attention, workspace, sequences, x, cos, sin, one_position, first, keys, values, room, positions, out, normed,"
     " threads)"},
    {"sums", sums, METH_VARARGS, "sums(matrix or expert, rows, results, threads) -> bytes that the call needs for sums"},
    {"widen", widen_codes, METH_VARARGS, "widen(pairs, ladders, count, run, codes)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels on packed weights; see the .h files.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
