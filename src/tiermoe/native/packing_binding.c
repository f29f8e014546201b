/* The Python face of encode.h and trellis.h. */
#include "binding.h"
#include "encode.h"
#include "trellis.h"

static PyObject *hqq(PyObject *self, PyObject *args) {
    unsigned threads;
    Hqq job;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&I", STRUCT(job), &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    hqq_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *encode(PyObject *self, PyObject *args) {
    unsigned threads;
    Codes job;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&I", STRUCT(job), &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    codes_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *uneven(PyObject *self, PyObject *args) {
    unsigned threads;
    Uneven job;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&I", STRUCT(job), &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    uneven_run(&job, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *trellis(PyObject *self, PyObject *args) {
    Trellis job;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&", STRUCT(job))) return NULL;
    Py_BEGIN_ALLOW_THREADS
    trellis_run(&job);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef packing_methods[] = {
    {"hqq", hqq, METH_VARARGS, "hqq(hqq, threads)"},
    {"encode", encode, METH_VARARGS, "encode(codes, threads)"},
    {"uneven", uneven, METH_VARARGS, "uneven(uneven, threads)"},
    {"trellis", trellis, METH_VARARGS, "trellis(trellis)"},
    {NULL, NULL, 0, NULL},
};
