/* The Python module: structs that Python describes, quants, instruction sets. Its other functions are listed by file. */
#include "attention.h"
#include "binding.h"
#include "convolution.h"
#include "delta.h"
#include "encode.h"
#include "expert.h"
#include "io.h"
#include "kernels.h"
#include "matrix.h"
#include "neurons.h"
#include "norm.h"
#include "prompt_attention.h"
#include "route.h"
#include "scan.h"
#include "trellis.h"

static PyMethodDef *const METHODS[] = {attention_methods, expert_methods, packing_methods};

/* Checks of what is packed: 0 with a ValueError where no kernel takes the values. */
static int check_matrix(void *packed) {
    const Matrix *matrix = packed;
    if (matrix->coding >= CODINGS) return PyErr_Format(PyExc_ValueError, "%d is not a coding", (int)matrix->coding), 0;
    if (matrix->scale_kind >= SCALE_KINDS)
        return PyErr_Format(PyExc_ValueError, "%d is no kind of scales", (int)matrix->scale_kind), 0;
    if (matrix->scale_rows && matrix->scale_columns && matrix->factor_rows) return 1;
    return PyErr_SetString(PyExc_ValueError, "a scale of no weights"), 0;
}

static int check_expert(void *packed) {
    Expert *expert = packed;
    if (expert->gate >= GATES) return PyErr_Format(PyExc_ValueError, "%d is not a gate", (int)expert->gate), 0;
    return check_matrix(&expert->first) && check_matrix(&expert->second);
}

static int check_router(void *packed) {
    const Router *router = packed;
    const size_t groups = router->groups, experts = router->experts, k = router->k, judges = router->judges;
    const int chooses = k > 0 && k <= MOST_EXPERTS && groups > 0 && router->kept > 0 && router->kept <= groups &&
                        experts % groups == 0 && router->kept * (experts / groups) >= k && judges > 0 && judges <= 2 &&
                        experts / groups >= judges;
    if (chooses && router->scoring < SCORINGS) return 1;
    PyErr_Format(PyExc_ValueError, "no router: %zu of %zu experts, from %zu of %zu groups judged by %zu, scoring %d", k, experts,
                 router->kept, groups, judges, (int)router->scoring);
    return 0;
}

static int convolves(const Convolution *layer) { return layer->kept < MOST_TAPS && layer->channels && layer->channels % 16 == 0; }

static int check_convolution(void *packed) {
    const Convolution *layer = packed;
    if (convolves(layer)) return 1;
    return PyErr_Format(PyExc_ValueError, "no convolution: %zu taps, %zu channels", layer->kept + 1, layer->channels), 0;
}

static int check_scan(void *packed) {
    const Scan *layer = packed;
    if (layer->groups && layer->heads && layer->heads % layer->groups == 0 && layer->columns && layer->columns % SCAN_COLUMNS == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "no state-space layer: %zu heads in %zu groups, of %zu columns", layer->heads, layer->groups,
                 layer->columns);
    return 0;
}

static int check_channel_scan(void *packed) {
    const ChannelScan *layer = packed;
    if (layer->channels && layer->channels % SCAN_COLUMNS == 0 && layer->state <= MOST_CHANNEL_STATE) return 1;
    PyErr_Format(PyExc_ValueError, "no state-space layer: %zu channels, states of %zu", layer->channels, layer->state);
    return 0;
}

static int check_delta(void *packed) {
    const Delta *layer = packed;
    if (convolves(&layer->convolution) && layer->key_heads && layer->heads && layer->heads % layer->key_heads == 0 &&
        layer->key_columns && layer->key_columns % DELTA_COLUMNS == 0 && layer->value_columns &&
        layer->value_columns % DELTA_COLUMNS == 0 && (layer->gate == DELTA_SILU || layer->gate == DELTA_SIGMOID) &&
        (layer->decay_columns == 1 || layer->decay_columns == layer->key_columns))
        return 1;
    PyErr_Format(PyExc_ValueError, "no linear attention: %zu of %zu heads, %zu and %zu columns, %zu taps, %zu decays, gate %d",
                 layer->key_heads, layer->heads, layer->key_columns, layer->value_columns, layer->convolution.kept + 1, layer->decay_columns,
                 layer->gate);
    return 0;
}

static int check_step(void *packed) { return step_measure(packed), 1; }

static int check_neurons(void *packed) {
    const Neurons *neurons = packed;
    const size_t group = neurons->group;
    const int bits = neurons->bits;
    if ((bits == 4 || bits == 2) && group >= 16 && group % 16 == 0 && neurons->width % (group * (size_t)(8 / bits)) == 0) return 1;
    PyErr_Format(PyExc_ValueError, "no neurons of %zu weights of %d bits in groups of %zu", neurons->width, bits, group);
    return 0;
}

static int check_codes(void *packed) {
    const Coding coding = ((const Codes *)packed)->coding;
    if (coding == INT8 || coding == INT6 || coding == INT4 || coding == INT2) return 1;
    return PyErr_Format(PyExc_ValueError, "coding %d is not packed here", (int)coding), 0;
}

static int check_hqq(void *packed) {
    const Hqq *job = packed;
    if (job->group <= MOST_GROUP && job->steps <= MOST_STEPS) return 1;
    return PyErr_Format(PyExc_ValueError, "hqq takes groups of %d and %d steps at most", MOST_GROUP, MOST_STEPS), 0;
}

static int check_uneven(void *packed) {
    const Coding coding = ((const Uneven *)packed)->coding;
    if (is_uneven(coding)) return 1;
    return PyErr_Format(PyExc_ValueError, "coding %d has no uneven levels", (int)coding), 0;
}

/* The structs that Python describes, by the name of its class. */
static const struct {
    const char *name;
    size_t size;
    int (*check)(void *packed); /* may fill in what only C knows; NULL: every value is taken */
} STRUCTS[] = {
    {"Matrix", sizeof(Matrix), check_matrix},
    {"Expert", sizeof(Expert), check_expert},
    {"Router", sizeof(Router), check_router},
    {"Norm", sizeof(Norm), NULL},
    {"Projection", sizeof(Projection), NULL},
    {"Attention", sizeof(Attention), NULL},
    {"Slabs", sizeof(Slabs), NULL},
    {"Step", sizeof(Step), check_step},
    {"Prompt", sizeof(Prompt), NULL},
    {"Convolution", sizeof(Convolution), check_convolution},
    {"StateRows", sizeof(StateRows), NULL},
    {"ConvolutionStep", sizeof(ConvolutionStep), NULL},
    {"Delta", sizeof(Delta), check_delta},
    {"DeltaStep", sizeof(DeltaStep), NULL},
    {"Scan", sizeof(Scan), check_scan},
    {"ScanStep", sizeof(ScanStep), NULL},
    {"ChannelScan", sizeof(ChannelScan), check_channel_scan},
    {"ChannelScanStep", sizeof(ChannelScanStep), NULL},
    {"Neurons", sizeof(Neurons), check_neurons},
    {"Weights", sizeof(Weights), NULL},
    {"Codes", sizeof(Codes), check_codes},
    {"Hqq", sizeof(Hqq), check_hqq},
    {"Uneven", sizeof(Uneven), check_uneven},
    {"Trellis", sizeof(Trellis), NULL},
};
enum { STRUCT_COUNT = sizeof STRUCTS / sizeof *STRUCTS };

static PyObject *structs(PyObject *self, PyObject *none) {
    PyObject *sizes = PyDict_New();
    (void)self, (void)none;
    for (size_t i = 0; sizes && i < STRUCT_COUNT; i++) {
        PyObject *size = PyLong_FromSize_t(STRUCTS[i].size);
        if (!size || PyDict_SetItemString(sizes, STRUCTS[i].name, size)) Py_CLEAR(sizes);
        Py_XDECREF(size);
    }
    return sizes;
}

static PyObject *pack(PyObject *self, PyObject *described) {
    PyObject *name = PyType_GetName(Py_TYPE(described));
    size_t i = 0;
    Py_buffer buffer;
    (void)self;
    while (name && i < STRUCT_COUNT && PyUnicode_CompareWithASCIIString(name, STRUCTS[i].name)) i++;
    if (i == STRUCT_COUNT) PyErr_Format(PyExc_TypeError, "no struct is called %U", name);
    Py_XDECREF(name);
    if (PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(described, &buffer, PyBUF_SIMPLE)) return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(buffer.buf, buffer.len);
    PyBuffer_Release(&buffer);
    if (bytes && STRUCTS[i].check && !STRUCTS[i].check(PyBytes_AsString(bytes))) Py_CLEAR(bytes);
    return bytes;
}

int take_struct(PyObject *bytes, void *taken) {
    const Taken *to = taken;
    if (!PyBytes_Check(bytes) || (size_t)PyBytes_Size(bytes) != to->size) {
        PyErr_Format(PyExc_ValueError, "expected %zu bytes of a packed struct", to->size);
        return 0;
    }
    memcpy(to->into, PyBytes_AsString(bytes), to->size);
    return 1;
}

#define QUANT_LINE(coding, name, columns, bytes, group, offsets) {#coding, columns, bytes, group},
static const struct {
    const char *name;
    int columns, bytes, group;
} QUANTS[] = {EACH_QUANT(QUANT_LINE)};

static PyObject *quants(PyObject *self, PyObject *none) {
    PyObject *all = PyList_New(0);
    (void)self, (void)none;
    for (size_t i = 0; all && i < CODINGS; i++) {
        PyObject *each = Py_BuildValue("siii", QUANTS[i].name, QUANTS[i].columns, QUANTS[i].bytes, QUANTS[i].group);
        if (!each || PyList_Append(all, each)) Py_CLEAR(all);
        Py_XDECREF(each);
    }
    return all;
}

#define GATE_NAME(name) #name,
static const char *const GATE_NAMES[] = {EACH_GATE(GATE_NAME)};

static PyObject *gates(PyObject *self, PyObject *none) {
    PyObject *all = PyList_New(0);
    (void)self, (void)none;
    for (size_t i = 0; all && i < GATES; i++) {
        PyObject *name = PyUnicode_FromString(GATE_NAMES[i]);
        if (!name || PyList_Append(all, name)) Py_CLEAR(all);
        Py_XDECREF(name);
    }
    return all;
}

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

static PyMethodDef module_methods[] = {
    {"structs", structs, METH_NOARGS, "structs() -> bytes of each struct, by name"},
    {"pack", pack, METH_O, "pack(struct) -> its bytes; ValueError where no kernel takes its values"},
    {"quants", quants, METH_NOARGS, "quants() -> name, columns and bytes of the smallest piece, columns to a scale, of each"},
    {"gates", gates, METH_NOARGS, "gates() -> names of the gates of experts, in the order of their numbers"},
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "instruction_sets() -> names of those whose kernels this machine runs, the fastest first"},
    {"use", use, METH_VARARGS, "use(name): the kernels of an instruction set, while none runs"},
    {"used", used, METH_NOARGS, "used() -> the name of the instruction set whose kernels run"},
    {"join_team", join_team, METH_VARARGS, "join_team(path) -> whether the loaded OpenMP runtime at path can be used"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Kernels on packed weights; see the .h files.", -1,
                                        module_methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    kernels_use(kernels_here()[0]->name);
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module && i < sizeof METHODS / sizeof *METHODS; i++)
        if (PyModule_AddFunctions(module, METHODS[i])) Py_CLEAR(module);
    PyObject *threads = module ? io_threads_type() : NULL;
    if (!threads || PyModule_AddObjectRef(module, "IOThreads", threads)) Py_CLEAR(module);
    Py_XDECREF(threads);
    PyObject *block = module ? moe_block_type() : NULL;
    if (!block || PyModule_AddObjectRef(module, "MoeBlock", block)) Py_CLEAR(module);
    Py_XDECREF(block);
    return module;
}
