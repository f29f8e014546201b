/* What the files of the Python module share. Python gives addresses and sizes, and keeps the tensors alive. What takes more than a
 * few numbers is a struct: a class of native/structs.py with the same fields, checked and turned into bytes by `pack`
 * (module.c). */
#ifndef TIERMOE_BINDING_H
#define TIERMOE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef unsigned long long Address;

static inline void *at(Address address) { return (void *)(uintptr_t)address; }

/* A packed struct among the arguments of PyArg_ParseTuple: "O&" with STRUCT(variable) copies it; ValueError for another size. */
typedef struct {
    void *into;
    size_t size;
} Taken;
int take_struct(PyObject *bytes, void *taken);
#define STRUCT(variable) take_struct, &(Taken){&(variable), sizeof(variable)}

/* Functions of the module; each table ends with a line of NULL and is listed in module.c. */
extern PyMethodDef attention_methods[], expert_methods[], packing_methods[];

/* The type `MoeBlock` (block_binding.c), or NULL with an exception. */
PyObject *moe_block_type(void);

#endif
