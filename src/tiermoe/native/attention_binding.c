/* The Python face of attention.h, prompt_attention.h, convolution.h, delta.h and scan.h. */
#include "attention.h"
#include "binding.h"
#include "convolution.h"
#include "delta.h"
#include "prompt_attention.h"
#include "scan.h"

static PyObject *workspace(PyObject *self, PyObject *args) {
    unsigned threads;
    Attention layer;
    Step step;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&O&I", STRUCT(layer), STRUCT(step), STRUCT(slabs), &threads)) return NULL;
    const char *misfit = attention_misfit(&layer, &step, &slabs);
    if (misfit) return PyErr_SetString(PyExc_ValueError, misfit), NULL;
    return PyLong_FromSize_t(attention_workspace(&layer, &step, &slabs, threads));
}

static PyObject *attend(PyObject *self, PyObject *args) {
    Address room, x, out, normed;
    unsigned threads;
    Attention layer;
    Step step;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&O&KKKKI", STRUCT(layer), STRUCT(step), STRUCT(slabs), &room, &x, &out, &normed, &threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    attention_run(&layer, &step, &slabs, at(x), at(out), at(normed), at(room), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *prompt_room(PyObject *self, PyObject *args) {
    unsigned threads;
    Slabs slabs;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&I", STRUCT(slabs), &threads)) return NULL;
    return PyLong_FromSize_t(prompt_workspace(&slabs, threads));
}

static PyObject *attend_prompt(PyObject *self, PyObject *args) {
    Address room;
    unsigned threads;
    Slabs slabs;
    Prompt prompt;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&KI", STRUCT(slabs), STRUCT(prompt), &room, &threads)) return NULL;
    const char *misfit = prompt_misfit(&prompt, &slabs);
    if (misfit) return PyErr_SetString(PyExc_ValueError, misfit), NULL;
    Py_BEGIN_ALLOW_THREADS
    prompt_attend(&prompt, &slabs, at(room), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *convolve(PyObject *self, PyObject *args) {
    Address out;
    unsigned threads;
    Convolution layer;
    ConvolutionStep step;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&KI", STRUCT(layer), STRUCT(step), &out, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    convolution_run(&layer, &step, at(out), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *delta_room(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Delta layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&n", STRUCT(layer), &tokens)) return NULL;
    return PyLong_FromSize_t(delta_workspace(&layer, (size_t)tokens));
}

static PyObject *run_delta(PyObject *self, PyObject *args) {
    Address room;
    unsigned threads;
    Delta layer;
    DeltaStep step;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&KI", STRUCT(layer), STRUCT(step), &room, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    delta_run(&layer, &step, at(room), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *scan_room(PyObject *self, PyObject *args) {
    Py_ssize_t tokens;
    Scan layer;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&n", STRUCT(layer), &tokens)) return NULL;
    return PyLong_FromSize_t(scan_workspace(&layer, (size_t)tokens));
}

static PyObject *run_scan(PyObject *self, PyObject *args) {
    Address room;
    unsigned threads;
    Scan layer;
    ScanStep step;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&KI", STRUCT(layer), STRUCT(step), &room, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    scan_run(&layer, &step, at(room), threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *run_channel_scan(PyObject *self, PyObject *args) {
    unsigned threads;
    ChannelScan layer;
    ChannelScanStep step;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&I", STRUCT(layer), STRUCT(step), &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    channel_scan_run(&layer, &step, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef attention_methods[] = {
    {"workspace", workspace, METH_VARARGS,
     "workspace(attention, step, slabs, threads) -> bytes that attend needs; ValueError where they do not fit"},
    {"attend", attend, METH_VARARGS, "attend(attention, step, slabs, workspace, x, out, normed, threads)"},
    {"prompt_workspace", prompt_room, METH_VARARGS, "prompt_workspace(slabs, threads) -> bytes that attend_prompt needs"},
    {"attend_prompt", attend_prompt, METH_VARARGS,
     "attend_prompt(slabs, prompt, workspace, threads); ValueError where they do not fit"},
    {"convolve", convolve, METH_VARARGS, "convolve(convolution, step, out, threads)"},
    {"delta_workspace", delta_room, METH_VARARGS, "delta_workspace(delta, tokens) -> bytes that run_delta needs"},
    {"run_delta", run_delta, METH_VARARGS, "run_delta(delta, step, workspace, threads)"},
    {"scan_workspace", scan_room, METH_VARARGS, "scan_workspace(scan, tokens) -> bytes that run_scan needs"},
    {"run_scan", run_scan, METH_VARARGS, "run_scan(scan, step, workspace, threads)"},
    {"run_channel_scan", run_channel_scan, METH_VARARGS, "run_channel_scan(scan, step, threads)"},
    {NULL, NULL, 0, NULL},
};
