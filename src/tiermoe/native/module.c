/* The Python face: addresses and sizes in, nothing out. Whoever calls holds the tensors and checks their shapes; a packed
 * matrix, expert or attention layer is kept by Python as the bytes of its struct. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention_binding.h"
#include "codes.h"
#include "delta.h"
#include "expert.h"
#include "hqq.h"
#include "kernels.h"
#include "moe_block.h"
#include "neurons.h"
#include "norm.h"
#include "product.h"
#include "route.h"
#include "uneven.h"

typedef unsigned long long Address;

static void *at(Address address) { return (void *)(uintptr_t)address; }

static PyObject *instruction_sets(PyObject *self, PyObject *none) {
    PyObject *names = PyList_New(0);
    (void)self, (void)none;
    for (const Kernels *const *each = kernels_here(); names && *each; each++) {
        PyObject *name = PyUnicode_FromString((*each)->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *use(PyObject *self, PyObject *args) {
    const char *name;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    if (!kernels_use(name)) return PyErr_Format(PyExc_ValueError, "no kernels named %s run here", name);
    Py_RETURN_NONE;
}

static PyObject *used(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyUnicode_FromString(kernels->name);
}

static PyObject *join_team(PyObject *self, PyObject *args) {
    const char *path;
    (void)self;
    if (!PyArg_ParseTuple(args, "s", &path)) return NULL;
    return PyBool_FromLong(team_join(path));
}

static PyObject *matrix(PyObject *self, PyObject *args) {
    int coding;
    Address weights, scales, ladders;
    Py_ssize_t rows, columns, group, scale_rows = 1, scale_columns = 1, factor_rows = 1;
    int kind = SCALE_FLOAT;
    (void)self;
    if (!PyArg_ParseTuple(args, "iKKnnnK|innn", &coding, &weights, &scales, &rows, &columns, &group, &ladders, &kind,
                          &scale_rows, &scale_columns, &factor_rows))
        return NULL;
    if (coding < 0 || coding >= CODINGS) return PyErr_Format(PyExc_ValueError, "%d is not a coding", coding);
    if (kind < 0 || kind >= SCALE_KINDS) return PyErr_Format(PyExc_ValueError, "%d is no kind of scales", kind);
    if (scale_rows < 1 || scale_columns < 1 || factor_rows < 1) return PyErr_Format(PyExc_ValueError, "a scale of no weights");
    const size_t shape[] = {(size_t)rows, (size_t)columns, (size_t)group};
    const Matrix packed = {(Coding)coding, at(weights), at(scales), shape[0], shape[1], shape[2], at(ladders),
                           (ScaleKind)kind, (size_t)scale_rows, (size_t)scale_columns, (size_t)factor_rows};
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
    Address x, room, out;
    unsigned threads;
    int torchs;
    Matrix packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KnKKIp", &bytes, &length, &x, &tokens, &room, &out, &threads, &torchs)) return NULL;
    if (!take(bytes, length, &packed, sizeof packed)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    product_run(&packed, at(x), (size_t)tokens, at(room), at(out), threads, torchs ? TORCHS : OWN);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *expert(PyObject *self, PyObject *args) {
    const char *matrices[2];
    Py_ssize_t lengths[2];
    Address biases[2];
    int gate;
    Expert packed;
    (void)self;
    memset(&packed, 0, sizeof packed);
    if (!PyArg_ParseTuple(args, "y#y#KKiff", &matrices[0], &lengths[0], &matrices[1], &lengths[1], &biases[0], &biases[1],
                          &gate, &packed.limit, &packed.alpha))
        return NULL;
    if (gate < 0 || gate >= GATES) return PyErr_Format(PyExc_ValueError, "%d is not a gate", gate);
    if (!take(matrices[0], lengths[0], &packed.first, sizeof packed.first)) return NULL;
    if (!take(matrices[1], lengths[1], &packed.second, sizeof packed.second)) return NULL;
    packed.gate = (Gate)gate, packed.first_bias = at(biases[0]), packed.second_bias = at(biases[1]);
    return PyBytes_FromStringAndSize((const char *)&packed, sizeof packed);
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

static PyObject *router(PyObject *self, PyObject *args) {
    Address weight, bias, correction;
    Py_ssize_t experts, columns, k, groups, kept, judges;
    int scoring;
    Router packed;
    (void)self;
    memset(&packed, 0, sizeof packed);
    if (!PyArg_ParseTuple(args, "KKKnnnnnnipppff", &weight, &bias, &correction, &experts, &columns, &k, &groups, &kept, &judges,
                          &scoring, &packed.exact_logits, &packed.round_weights, &packed.normalise, &packed.epsilon,
                          &packed.scale))
        return NULL;
    const int chooses = k > 0 && k <= MOST_EXPERTS && groups > 0 && kept > 0 && kept <= groups && experts % groups == 0 &&
                        kept * (experts / groups) >= k && judges > 0 && judges <= 2 && experts / groups >= judges;
    if (!chooses || scoring < 0 || scoring >= SCORINGS)
        return PyErr_Format(PyExc_ValueError, "no router: %zd of %zd experts, from %zd of %zd groups judged by %zd, scoring %d",
                            k, experts, kept, groups, judges, scoring);
    packed.weight = at(weight), packed.bias = at(bias), packed.correction = at(correction);
    packed.experts = (size_t)experts, packed.columns = (size_t)columns, packed.k = (size_t)k;
    packed.groups = (size_t)groups, packed.kept = (size_t)kept, packed.judges = (size_t)judges;
    packed.scoring = (Scoring)scoring;
    return PyBytes_FromStringAndSize((const char *)&packed, sizeof packed);
}

static PyObject *route(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    Address x, chosen, weights;
    Router packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KnKK", &bytes, &length, &x, &tokens, &chosen, &weights)) return NULL;
    if (!take(bytes, length, &packed, sizeof packed)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    float logits[packed.experts];
    for (size_t t = 0; t < (size_t)tokens; t++) {
        route_logits(&packed, (bf16 *)at(x) + t * packed.columns, logits);
        route_choose(&packed, logits, (int64_t *)at(chosen) + t * packed.k, (float *)at(weights) + t * packed.k);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *logits(PyObject *self, PyObject *args) {
    Address weight, x, out;
    Py_ssize_t experts, columns, tokens;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnnK", &weight, &x, &tokens, &experts, &columns, &out)) return NULL;
    const Router plain = {.weight = at(weight), .experts = (size_t)experts, .columns = (size_t)columns};
    Py_BEGIN_ALLOW_THREADS
    float exact[experts];
    for (Py_ssize_t t = 0; t < tokens; t++) {
        route_logits(&plain, (bf16 *)at(x) + t * columns, exact);
        for (Py_ssize_t e = 0; e < experts; e++) ((bf16 *)at(out))[t * experts + e] = to_bf16(exact[e]);
    }
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

/* Reads a block whose router is `bytes` and whose experts are `table`; ValueError where they do not belong together. */
static int take_block(const char *bytes, Py_ssize_t length, const Py_buffer *table, MoeBlock *block) {
    if (!take(bytes, length, &block->router, sizeof block->router)) return 0;
    block->experts = table->buf;
    if ((size_t)table->len == block->router.experts * sizeof(Expert)) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a table of %zu experts", table->len, block->router.experts);
    return 0;
}

static PyObject *block_workspace(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    Py_buffer table;
    unsigned threads;
    size_t needed = 0;
    MoeBlock packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#y*nI", &bytes, &length, &table, &tokens, &threads)) return NULL;
    if (take_block(bytes, length, &table, &packed)) needed = moe_block_workspace(&packed, (size_t)tokens, threads);
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
    const char *bytes;
    Py_ssize_t length, tokens;
    Py_buffer table;
    Address x, workspace;
    unsigned threads;
    BlockCall call;
    (void)self;
    memset(&call, 0, sizeof call);
    if (!PyArg_ParseTuple(args, "y#y*KnKI", &bytes, &length, &table, &x, &tokens, &workspace, &threads)) return NULL;
    const int fits = take_block(bytes, length, &table, &call.block);
    PyBuffer_Release(&table);
    if (!fits) return NULL;
    call.x = at(x), call.tokens = (size_t)tokens, call.workspace = at(workspace), call.threads = threads;
    return PyBytes_FromStringAndSize((const char *)&call, sizeof call);
}

static PyObject *block(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length;
    Address residual, out;
    size_t computed;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KK", &bytes, &length, &residual, &out) || !take(bytes, length, &call, sizeof call)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    computed = moe_block_run(&call.block, call.x, at(residual), call.tokens, call.workspace, at(out), call.threads);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(computed);
}

static PyObject *block_route(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length;
    Address chosen;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#K", &bytes, &length, &chosen) || !take(bytes, length, &call, sizeof call)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_route(&call.block, call.x, call.tokens, call.workspace, call.threads, at(chosen));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *block_routed(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length;
    Address chosen, weights;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KK", &bytes, &length, &chosen, &weights) || !take(bytes, length, &call, sizeof call)) return NULL;
    moe_block_routed(&call.block, at(chosen), at(weights), call.tokens, call.workspace, call.threads);
    Py_RETURN_NONE;
}

static PyObject *block_experts(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, row;
    PyObject *list;
    size_t next;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#O!n", &bytes, &length, &PyList_Type, &list, &row) || !take(bytes, length, &call, sizeof call))
        return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(list);
    int64_t experts[count ? count : 1];
    for (Py_ssize_t i = 0; i < count; i++) {
        experts[i] = PyLong_AsLongLong(PyList_GET_ITEM(list, i));
        if (experts[i] >= 0 && (size_t)experts[i] < call.block.router.experts) continue;
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no expert %lld", (long long)experts[i]);
    }
    Py_BEGIN_ALLOW_THREADS
    next = moe_block_experts(&call.block, call.x, call.tokens, call.workspace, call.threads, experts, (size_t)count, (size_t)row);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(next);
}

static PyObject *block_sum(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length;
    Address residual, out;
    BlockCall call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#KK", &bytes, &length, &residual, &out) || !take(bytes, length, &call, sizeof call)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    moe_block_sum(&call.block, at(residual), call.tokens, call.workspace, call.threads, at(out));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *widen_codes(PyObject *self, PyObject *args) {
    Address pairs, ladders, codes;
    Py_ssize_t count, run;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnK", &pairs, &ladders, &count, &run, &codes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    kernels->widen(at(pairs), at(ladders), (size_t)count, (size_t)run, at(codes));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *neurons(PyObject *self, PyObject *args) {
    Address records, used, gates, x, workspace, out;
    Py_ssize_t record_bytes, width, group, count, floats;
    int bits;
    unsigned threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnniKnKKKnKI", &records, &record_bytes, &width, &group, &bits, &used, &count, &gates, &x,
                          &workspace, &floats, &out, &threads))
        return NULL;
    const Neurons packed = {at(records), (size_t)record_bytes, (size_t)width, (size_t)group, bits,
                            at(used),    (size_t)count,        at(gates)};
    if ((bits != 4 && bits != 2) || group < 16 || group % 16 || width % (group * (8 / bits)))
        return PyErr_Format(PyExc_ValueError, "no neurons of %zd weights of %d bits in groups of %zd", width, bits, group);
    if (neurons_workspace(&packed) > (size_t)floats)
        return PyErr_Format(PyExc_ValueError, "neurons need a workspace of %zu floats", neurons_workspace(&packed));
    Py_BEGIN_ALLOW_THREADS
    neurons_run(&packed, at(x), at(workspace), at(out), threads);
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

static PyObject *solve_hqq(PyObject *self, PyObject *args) {
    Address weights, thresholds, codes, scale, offset, shrunk;
    Py_ssize_t rows, columns, group, block, steps;
    unsigned threads;
    float largest;
    int wide;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnpnnfKnKKKKI", &weights, &rows, &columns, &wide, &group, &block, &largest, &thresholds, &steps,
                          &codes, &scale, &offset, &shrunk, &threads))
        return NULL;
    const Hqq job = {{at(weights), (size_t)rows, (size_t)columns, wide}, (size_t)group, (size_t)block, largest, at(thresholds),
                     (size_t)steps, at(codes), at(scale), at(offset), at(shrunk)};
    if (group > MOST_GROUP || steps > MOST_STEPS)
        return PyErr_Format(PyExc_ValueError, "hqq takes groups of %d and %d steps at most", MOST_GROUP, MOST_STEPS);
    Py_BEGIN_ALLOW_THREADS
    hqq_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *encode(PyObject *self, PyObject *args) {
    Address weights, scales, zeros, codes, chosen, squares;
    Py_ssize_t rows, columns, group, together, bytes;
    const char *ladders;
    unsigned threads;
    int coding, wide, exact;
    (void)self;
    if (!PyArg_ParseTuple(args, "iKnnpnpKKKKy#nKI", &coding, &weights, &rows, &columns, &wide, &group, &exact, &scales, &zeros,
                          &codes, &chosen, &ladders, &bytes, &together, &squares, &threads))
        return NULL;
    const Codes job = {(Coding)coding, {at(weights), (size_t)rows, (size_t)columns, wide}, (size_t)group, exact, at(scales),
                       at(zeros), at(codes), at(chosen), (const Ladder *)ladders, (size_t)bytes / sizeof(Ladder),
                       (size_t)together, at(squares)};
    if (coding != INT8 && coding != INT6 && coding != INT4 && coding != INT2)
        return PyErr_Format(PyExc_ValueError, "coding %d is not packed here", coding);
    Py_BEGIN_ALLOW_THREADS
    codes_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *encode_uneven(PyObject *self, PyObject *args) {
    Address weights, candidates, blocks;
    Py_ssize_t rows, columns, group, count, steps;
    unsigned threads;
    int coding;
    (void)self;
    if (!PyArg_ParseTuple(args, "iKnnnKnnKI", &coding, &weights, &rows, &columns, &group, &candidates, &count, &steps, &blocks, &threads))
        return NULL;
    const Uneven job = {(Coding)coding, at(weights), (size_t)rows, (size_t)columns, (size_t)group, at(candidates), (size_t)count,
                        (size_t)steps, at(blocks)};
    if (coding < NL4 || coding > NL2) return PyErr_Format(PyExc_ValueError, "coding %d has no uneven levels", coding);
    Py_BEGIN_ALLOW_THREADS
    uneven_run(&job, threads);
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

static PyObject *delta(PyObject *self, PyObject *args) {
    Address taps, rates, biases, weight;
    Py_ssize_t kept, key_heads, heads, key_columns, value_columns;
    Delta layer = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKfnnnnn", &taps, &rates, &biases, &weight, &layer.epsilon, &kept, &key_heads, &heads,
                          &key_columns, &value_columns))
        return NULL;
    layer.taps = at(taps), layer.rates = at(rates), layer.biases = at(biases), layer.norm = at(weight);
    layer.kept = (size_t)kept, layer.key_heads = (size_t)key_heads, layer.heads = (size_t)heads;
    layer.key_columns = (size_t)key_columns, layer.value_columns = (size_t)value_columns;
    if (kept < 0 || kept >= MOST_TAPS || key_heads < 1 || heads < 1 || heads % key_heads || key_columns < 1 ||
        key_columns % DELTA_COLUMNS || value_columns < 1 || value_columns % DELTA_COLUMNS)
        return PyErr_Format(PyExc_ValueError, "no linear attention: %zd of %zd heads, %zd and %zd columns, %zd taps", key_heads,
                            heads, key_columns, value_columns, kept + 1);
    return PyBytes_FromStringAndSize((const char *)&layer, sizeof layer);
}

static PyObject *delta_room(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens;
    Delta layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#n", &bytes, &length, &tokens) || !take(bytes, length, &layer, sizeof layer)) return NULL;
    return PyLong_FromSize_t(delta_workspace(&layer, (size_t)tokens));
}

static PyObject *run_delta(PyObject *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length, tokens, rows, mixed_stride, gates_stride, betas_stride, decays_stride;
    Address ends, from, to, mixed, gates, betas, decays, inputs, states, workspace, out;
    unsigned threads;
    Delta layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#nnKKKKnKnKnKnKKKKI", &bytes, &length, &tokens, &rows, &ends, &from, &to, &mixed, &mixed_stride,
                          &gates, &gates_stride, &betas, &betas_stride, &decays, &decays_stride, &inputs, &states, &workspace,
                          &out, &threads))
        return NULL;
    if (!take(bytes, length, &layer, sizeof layer)) return NULL;
    const DeltaStep step = {(size_t)tokens, (size_t)rows, at(ends), at(from), at(to), at(mixed), at(gates), at(betas), at(decays),
                            (size_t)mixed_stride, (size_t)gates_stride, (size_t)betas_stride, (size_t)decays_stride,
                            at(inputs), at(states), at(out)};
    Py_BEGIN_ALLOW_THREADS
    delta_run(&layer, &step, at(workspace), threads);
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

static PyMethodDef methods[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "instruction_sets() -> names of those whose kernels this machine runs, the fastest first"},
    {"use", use, METH_VARARGS, "use(name): the kernels of an instruction set, while none runs"},
    {"used", used, METH_NOARGS, "used() -> the name of the instruction set whose kernels run"},
    {"join_team", join_team, METH_VARARGS, "join_team(path) -> whether the loaded OpenMP runtime at path can be used"},
    {"matrix", matrix, METH_VARARGS, "matrix(coding, weights, scales, rows, columns, group, ladders[, scale kind, rows, columns, factor's rows]) -> bytes of a Matrix"},
    {"product", product, METH_VARARGS, "product(matrix, x, tokens, room, out, threads, torchs)"},
    {"expert", expert, METH_VARARGS,
     "expert(first, second, first_bias, second_bias, gate, limit, alpha) -> bytes of an Expert"},
    {"experts", experts, METH_VARARGS, "experts(experts, counts, x, rows, inner, room, out, threads, torchs)"},
    {"combine", combine, METH_VARARGS, "combine(rows, weights, columns, out)"},
    {"combine_many", combine_many, METH_VARARGS, "combine_many(addresses, weights, tokens, k, columns, out, threads)"},
    {"router", router, METH_VARARGS,
     "router(weight, bias, correction, experts, columns, k, groups, kept, judges, scoring, exact_logits, round_weights,"
     " normalise, epsilon, scale) -> bytes of a Router"},
    {"route", route, METH_VARARGS, "route(router, x, tokens, chosen, weights)"},
    {"logits", logits, METH_VARARGS, "logits(weight, x, tokens, experts, columns, out)"},
    {"choose", choose, METH_VARARGS, "choose(logits, tokens, experts, k, normalise, chosen, weights)"},
    {"block_workspace", block_workspace, METH_VARARGS, "block_workspace(router, experts, tokens, threads) -> bytes that block needs"},
    {"block_call", block_call, METH_VARARGS,
     "block_call(router, experts, x, tokens, workspace, threads) -> bytes of a BlockCall, valid as long as all of these live"},
    {"block_route", block_route, METH_VARARGS, "block_route(call, chosen): what each token chooses, in ascending order"},
    {"block_routed", block_routed, METH_VARARGS, "block_routed(call, chosen, weights): a choice that is known"},
    {"block_experts", block_experts, METH_VARARGS, "block_experts(call, which, row) -> the next call's row, 0 at first"},
    {"block_sum", block_sum, METH_VARARGS, "block_sum(call, residual, out)"},
    {"block", block, METH_VARARGS, "block(call, residual, out) -> how many experts computed, 0 where a chosen one is not here"},
    {"hqq", solve_hqq, METH_VARARGS,
     "hqq(weights, rows, columns, wide, group, block, largest, thresholds, steps, codes, scale, offset, shrunk, threads)"},
    {"encode", encode, METH_VARARGS,
     "encode(coding, weights, rows, columns, wide, group, exact, scales, zeros, codes, chosen, ladders, together, squares,"
     " threads)"},
    {"uneven", encode_uneven, METH_VARARGS, "uneven(coding, weights, rows, columns, group, candidates, count, steps, blocks, threads)"},
    {"neurons", neurons, METH_VARARGS,
     "neurons(records, record_bytes, width, group, bits, used, count, gates, x, workspace, floats, out, threads)"},
    {"gather", gather, METH_VARARGS, "gather(from, to, row_bytes, used, count): rows to their places"},
    {"norm", norm, METH_VARARGS, "norm(x, weight, epsilon, kind, rows, width, out, threads)"},
    {"delta", delta, METH_VARARGS,
     "delta(taps, rates, biases, norm, epsilon, kept, key_heads, heads, key_columns, value_columns) -> bytes of a Delta"},
    {"delta_workspace", delta_room, METH_VARARGS, "delta_workspace(delta, tokens) -> bytes that run_delta needs"},
    {"run_delta", run_delta, METH_VARARGS,
     "run_delta(delta, tokens, rows, ends, from, to, mixed, stride, gates, stride, betas, stride, decays, stride, inputs, states,"
     " workspace, out, threads)"},
    ATTENTION_METHODS,
    {"prepared", prepared, METH_VARARGS, "prepared(matrix or expert, rows, results, threads) -> bytes of the call's room"},
    {"widen", widen_codes, METH_VARARGS, "widen(pairs, ladders, count, run, codes)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels on packed weights; see the .h files.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    kernels_use(kernels_here()[0]->name);
    return PyModule_Create(&module);
}
