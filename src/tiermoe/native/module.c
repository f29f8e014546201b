/* The Python face: addresses and sizes in, nothing out. Whoever calls holds the tensors and checks their shapes; a packed
 * matrix, expert or attention layer is kept by Python as the bytes of its struct. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"
#include "expert.h"
#include "moe_block.h"
#include "norm.h"
#include "product.h"
#include "route.h"
#include "widen.h"

enum { MOST_EXPERTS = 256 }; /* of a token */

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

static PyObject *experts(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    Address x, inner, sums, out;
    unsigned threads;
    int torchs;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KnKKKIp", &bytes, &length, &x, &tokens, &inner, &sums, &out, &threads, &torchs))
        return NULL;
    if (length == 0 || length % (Py_ssize_t)sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not whole experts of %zu", length, sizeof(Expert));
    Py_BEGIN_ALLOW_THREADS
    experts_run((const Expert *)bytes, (size_t)length / sizeof(Expert), at(x), (size_t)tokens, at(inner), at(sums), at(out),
                threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
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
    if (count < 1 || count > MOST_EXPERTS || PyList_GET_SIZE(weights) != count)
        return PyErr_Format(PyExc_ValueError, "%zd rows and %zd weights: 1 to %d of each, as many of one as of the other",
                            count, PyList_GET_SIZE(weights), MOST_EXPERTS);
    for (Py_ssize_t i = 0; i < count; i++) {
        addresses[i] = at(PyLong_AsUnsignedLongLong(PyList_GET_ITEM(rows, i)));
        factors[i] = (float)PyFloat_AsDouble(PyList_GET_ITEM(weights, i));
    }
    if (PyErr_Occurred()) return NULL;
    experts_combine(addresses, factors, (size_t)count, (size_t)columns, at(out));
    Py_RETURN_NONE;
}

static PyObject *logits(PyObject *self, PyObject *args) {
    Address weight, x, out;
    Py_ssize_t experts, columns;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnK", &weight, &x, &experts, &columns, &out)) return NULL;
    route_logits(at(weight), at(x), (size_t)experts, (size_t)columns, at(out));
    Py_RETURN_NONE;
}

static PyObject *choose(PyObject *self, PyObject *args) {
    Address logits, chosen, weights;
    Py_ssize_t experts, k;
    int normalise;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnpKK", &logits, &experts, &k, &normalise, &chosen, &weights)) return NULL;
    route_choose(at(logits), (size_t)experts, (size_t)k, normalise, at(chosen), at(weights));
    Py_RETURN_NONE;
}

/* Whether `table` holds `count` experts, more than k. */
static int is_table(const Py_buffer *table, Py_ssize_t count, Py_ssize_t k) {
    if (count > 0 && k > 0 && k <= count && table->len == count * (Py_ssize_t)sizeof(Expert)) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of %zd experts, %zd of which are chosen", table->len, count, k);
    return 0;
}

static PyObject *block_workspace(PyObject *self, PyObject *args) {
    Py_buffer table;
    Py_ssize_t count, k;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnI", &table, &count, &k, &threads)) return NULL;
    const size_t bytes = is_table(&table, count, k) ? moe_block_workspace(table.buf, (size_t)count, (size_t)k, threads) : 0;
    PyBuffer_Release(&table);
    return bytes ? PyLong_FromSize_t(bytes) : NULL;
}

static PyObject *block(PyObject *self, PyObject *args) {
    Py_buffer table;
    Py_ssize_t count, k, columns;
    Address router, x, residual, workspace, out;
    unsigned threads;
    int normalise, round_weights, done = -1;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ky*nnnppKKKKI", &router, &table, &count, &k, &columns, &normalise, &round_weights, &x,
                          &residual, &workspace, &out, &threads))
        return NULL;
    if (is_table(&table, count, k)) {
        const MoeBlock packed = {at(router), table.buf, (size_t)count, (size_t)k, (size_t)columns, normalise, round_weights};
        Py_BEGIN_ALLOW_THREADS
        done = moe_block_run(&packed, at(x), at(residual), at(workspace), at(out), threads);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&table);
    return done < 0 ? NULL : PyBool_FromLong(done);
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

static PyObject *norm(PyObject *self, PyObject *args) {
    Address x, weight, out;
    float epsilon;
    Py_ssize_t width;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKfnK", &x, &weight, &epsilon, &width, &out)) return NULL;
    norm_apply(at(x), at(weight), norm_scale(at(x), (size_t)width, epsilon), (size_t)width, at(out));
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
    Py_ssize_t length, positions;
    unsigned threads;
    Attention layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nI", &bytes, &length, &positions, &threads)) return NULL;
    if (!take(bytes, length, &layer, sizeof layer)) return NULL;
    return PyLong_FromSize_t(attention_workspace(&layer, (size_t)positions, threads));
}

static PyObject *attend(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, room, positions;
    Address workspace, x, cos, sin, keys, values, out, normed;
    unsigned threads;
    Attention layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KKKKKKnnKKI", &bytes, &length, &workspace, &x, &cos, &sin, &keys, &values, &room,
                          &positions, &out, &normed, &threads))
        return NULL;
    if (!take(bytes, length, &layer, sizeof layer)) return NULL;
    const Step step = {at(x),  at(cos), at(sin), at(keys), at(values), (size_t)room, (size_t)positions,
                       at(out), at(normed)};
    Py_BEGIN_ALLOW_THREADS
    attention_run(&layer, &step, at(workspace), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *sums(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nI", &bytes, &length, &tokens, &threads)) return NULL;
    if (length == sizeof(Int4)) return PyLong_FromSize_t(sizeof(float) * sums_room((const Int4 *)bytes, (size_t)tokens, threads));
    if (length == 0 || length % (Py_ssize_t)sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are neither a matrix nor experts", length);
    return PyLong_FromSize_t(
        sizeof(float) * experts_sums((const Expert *)bytes, (size_t)length / sizeof(Expert), (size_t)tokens, threads));
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "supported() -> whether this machine has AVX-512 with BF16 and VBMI"},
    {"join_team", join_team, METH_VARARGS, "join_team(path) -> whether the loaded OpenMP runtime at path can be used"},
    {"matrix", matrix, METH_VARARGS, "matrix(codes, scales, rows, columns, group) -> bytes of an Int4"},
    {"product", product, METH_VARARGS, "product(matrix, x, tokens, sums, out, threads, torchs)"},
    {"experts", experts, METH_VARARGS, "experts(experts, x, tokens, inner, sums, out, threads, torchs)"},
    {"combine", combine, METH_VARARGS, "combine(rows, weights, columns, out)"},
    {"logits", logits, METH_VARARGS, "logits(weight, x, experts, columns, out)"},
    {"choose", choose, METH_VARARGS, "choose(logits, experts, k, normalise, chosen, weights)"},
    {"block_workspace", block_workspace, METH_VARARGS, "block_workspace(experts, count, k, threads) -> bytes that block needs"},
    {"block", block, METH_VARARGS,
     "block(router, experts, count, k, columns, normalise, round_weights, x, residual, workspace, out, threads) -> whether"
     " all chosen experts were here"},
    {"norm", norm, METH_VARARGS, "norm(x, weight, epsilon, width, out)"},
    {"attention", attention, METH_VARARGS,
     "attention(query, key, value, output, biases, norm_before, norm_after, norm_query, norm_key, norm_width, heads, kv_heads,"
     " head_columns, epsilon, scale) -> bytes of an Attention"},
    {"workspace", workspace, METH_VARARGS, "workspace(attention, positions, threads) -> bytes that attend needs"},
    {"attend", attend, METH_VARARGS,
     "attend(attention, workspace, x, cos, sin, keys, values, room, positions, out, normed, threads)"},
    {"sums", sums, METH_VARARGS, "sums(matrix or experts, tokens, threads) -> bytes that the call needs for sums"},
    {"widen", widen_codes, METH_VARARGS, "widen(pairs, ladders, count, run, codes)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels on packed weights; see the .h files.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
