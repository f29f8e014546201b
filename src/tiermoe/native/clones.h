/* CLONES: a function of plain C that is compiled several times, where the compiler and the system can choose among them at run
 * time. */
#ifndef TIERMOE_CLONES_H
#define TIERMOE_CLONES_H

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#endif
