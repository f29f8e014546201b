/* Threads that read experts into slots, without the interpreter. */
#ifndef TIERMOE_IO_H
#define TIERMOE_IO_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The type `IOThreads`, or NULL with an exception; see _native.pyi. */
PyObject *io_threads_type(void);

#endif
