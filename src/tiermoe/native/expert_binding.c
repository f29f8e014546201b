/* The Python face of expert.h, matrix.h, neurons.h, norm.h and route.h. */
#include "binding.h"
#include "expert.h"
#include "matrix.h"
#include "neurons.h"
#include "norm.h"
#include "route.h"
#include <stdlib.h>

static PyObject *product(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Address x, room, out;
    unsigned threads;
    int torchs;
    Matrix matrix;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KnKKIp", STRUCT(matrix), &x, &tokens, &room, &out, &threads, &torchs)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    product_run(&matrix, at(x), (size_t)tokens, at(room), at(out), threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Lists each expert in `bytes` with its tokens: `counts` says how many consecutive rows of x each has; None: all have the
 * same `rows`. To be freed; NULL with an exception where they do not fit. */
static Share *shares_of(const char *bytes, Py_ssize_t length, PyObject *counts, size_t rows) {
    const size_t experts = (size_t)length / sizeof(Expert);
    if (length == 0 || length % (Py_ssize_t)sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not whole experts of %zu", length, sizeof(Expert)), NULL;
    if (counts != Py_None && (!PyList_Check(counts) || (size_t)PyList_Size(counts) != experts))
        return PyErr_Format(PyExc_ValueError, "counts must be None or a list of %zu", experts), NULL;
    Share *shares = malloc(experts * sizeof *shares);
    if (!shares) return PyErr_NoMemory(), NULL;
    size_t from = 0, to = 0;
    for (size_t e = 0; e < experts; e++) {
        const size_t tokens = counts == Py_None ? rows : PyLong_AsSize_t(PyList_GetItem(counts, (Py_ssize_t)e));
        memcpy(&shares[e].expert, bytes + e * sizeof(Expert), sizeof(Expert));
        shares[e].from = from, shares[e].to = to, shares[e].tokens = tokens;
        to += tokens;
        if (counts != Py_None) from += tokens;
    }
    if (!PyErr_Occurred() && counts != Py_None && from != rows)
        PyErr_Format(PyExc_ValueError, "counts of %zu rows in all for %zu rows", from, rows);
    if (!PyErr_Occurred()) return shares;
    free(shares);
    return NULL;
}


static PyObject *experts(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, rows;
    PyObject *counts;
    Address x, inner, room, out;
    unsigned threads;
    int torchs;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#OKnKKKIp", &bytes, &length, &counts, &x, &rows, &inner, &room, &out, &threads, &torchs))
        return NULL;
    Share *shares = shares_of(bytes, length, counts, (size_t)rows);
    if (!shares) return NULL;
    const size_t count = (size_t)length / sizeof(Expert), results = shares[count - 1].to + shares[count - 1].tokens;
    Py_BEGIN_ALLOW_THREADS
    experts_run(shares, count, at(x), (size_t)rows, results, at(inner), at(room), at(out), threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
    free(shares);
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
    const Py_ssize_t count = PyList_Size(rows);
    if (count > MOST_EXPERTS || PyList_Size(weights) != count)
        return PyErr_Format(PyExc_ValueError, "%zd rows and %zd weights: at most %d of each, as many of one as of the other",
                            count, PyList_Size(weights), MOST_EXPERTS);
    for (Py_ssize_t i = 0; i < count; i++) {
        addresses[i] = at(PyLong_AsUnsignedLongLong(PyList_GetItem(rows, i)));
        factors[i] = (float)PyFloat_AsDouble(PyList_GetItem(weights, i));
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

static PyObject *route(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Address x, chosen, weights;
    Router router;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KnKKI", STRUCT(router), &x, &tokens, &chosen, &weights, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    route_run(&router, at(x), (size_t)tokens, at(chosen), at(weights), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *logits(PyObject *self, PyObject *args) {
    Address weight, x, out;
    Py_ssize_t parts, experts, columns, tokens;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnKnnnKI", &weight, &parts, &x, &tokens, &experts, &columns, &out, &threads)) return NULL;
    const Router plain = {.weight = at(weight), .parts = (size_t)parts, .experts = (size_t)experts, .columns = (size_t)columns,
                          .exact_logits = 1};
    Py_BEGIN_ALLOW_THREADS
    route_logits_run(&plain, at(x), (size_t)tokens, at(out), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *choose(PyObject *self, PyObject *args) {
    Address logits, chosen, weights;
    Py_ssize_t experts, k, tokens;
    int normalise;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnnpKK", &logits, &tokens, &experts, &k, &normalise, &chosen, &weights)) return NULL;
    const Router plain = {.experts = (size_t)experts, .k = (size_t)k, .groups = 1, .normalise = normalise, .scale = 1};
    Py_BEGIN_ALLOW_THREADS
    float exact[experts];
    for (Py_ssize_t t = 0; t < tokens; t++) {
        for (Py_ssize_t e = 0; e < experts; e++) exact[e] = from_bf16(((bf16 *)at(logits))[t * experts + e]);
        route_choose(&plain, exact, (int64_t *)at(chosen) + t * k, (float *)at(weights) + t * k);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *prepared(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, rows, results;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nnI", &bytes, &length, &rows, &results, &threads)) return NULL;
    if (length == sizeof(Matrix)) return PyLong_FromSize_t(sizeof(float) * prepared_room((const Matrix *)bytes, (size_t)rows, threads));
    if (length != sizeof(Expert))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are neither a matrix nor an expert", length);
    return PyLong_FromSize_t(sizeof(float) * experts_prepared((const Expert *)bytes, (size_t)rows, (size_t)results, threads));
}

static PyObject *neurons(PyObject *self, PyObject *args) {
    Address x, workspace, out;
    Py_ssize_t floats;
    unsigned threads;
    Neurons neurons;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&KKnKI", STRUCT(neurons), &x, &workspace, &floats, &out, &threads)) return NULL;
    if (neurons_workspace(&neurons) > (size_t)floats)
        return PyErr_Format(PyExc_ValueError, "neurons need a workspace of %zu floats", neurons_workspace(&neurons));
    Py_BEGIN_ALLOW_THREADS
    neurons_run(&neurons, at(x), at(workspace), at(out), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *gather(PyObject *self, PyObject *args) {
    Address from, to, used;
    Py_ssize_t row_bytes, count;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnKn", &from, &to, &row_bytes, &used, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    neurons_gather(at(from), at(to), (size_t)row_bytes, at(used), (size_t)count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *norm(PyObject *self, PyObject *args) {
    Address x, weight, out;
    float epsilon;
    Py_ssize_t rows, width;
    unsigned threads;
    int kind;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKfinnKI", &x, &weight, &epsilon, &kind, &rows, &width, &out, &threads)) return NULL;
    if (kind < 0 || kind >= LAYER_NORM) return PyErr_Format(PyExc_ValueError, "%d is no root mean square norm", kind);
    Py_BEGIN_ALLOW_THREADS
    norm_run(at(x), at(weight), epsilon, (NormKind)kind, (size_t)rows, (size_t)width, at(out), threads, TORCHS);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef expert_methods[] = {
    {"product", product, METH_VARARGS, "product(matrix, x, tokens, room, out, threads, torchs)"},
    {"experts", experts, METH_VARARGS, "experts(experts, counts, x, rows, inner, room, out, threads, torchs)"},
    {"combine", combine, METH_VARARGS, "combine(rows, weights, columns, out)"},
    {"combine_many", combine_many, METH_VARARGS, "combine_many(addresses, weights, tokens, k, columns, out, threads)"},
    {"route", route, METH_VARARGS, "route(router, x, tokens, chosen, weights, threads)"},
    {"logits", logits, METH_VARARGS, "logits(weight, parts, x, tokens, experts, columns, out, threads)"},
    {"choose", choose, METH_VARARGS, "choose(logits, tokens, experts, k, normalise, chosen, weights)"},
    {"prepared", prepared, METH_VARARGS, "prepared(matrix or expert, rows, results, threads) -> bytes of the call's room"},
    {"neurons", neurons, METH_VARARGS,
     "neurons(neurons, x, workspace, floats, out, threads)"},
    {"gather", gather, METH_VARARGS, "gather(from, to, row_bytes, used, count): rows to their places"},
    {"norm", norm, METH_VARARGS, "norm(x, weight, epsilon, kind, rows, width, out, threads)"},
    {NULL, NULL, 0, NULL},
};
