/* The module `io_check`: native/io.c alone, built under a sanitizer for io_check.py. */
#include "io.h"

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "io_check", .m_size = -1};

PyMODINIT_FUNC PyInit_io_check(void) {
    PyObject *module = PyModule_Create(&definition), *type = io_threads_type();
    if (!module || !type || PyModule_AddObjectRef(module, "IOThreads", type)) Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
