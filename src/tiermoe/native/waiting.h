/* How a thread waits for a number that another thread changes: awake, or asleep where the system can do that. */
#ifndef TIERMOE_WAITING_H
#define TIERMOE_WAITING_H

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#define TIERMOE_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__) || defined(__arm__)
#define TIERMOE_PAUSE() __asm__ __volatile__("yield")
#else
#define TIERMOE_PAUSE() sched_yield()
#endif

#if defined(__linux__)

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sleeps until `wake_all`, unless *number is not `seen` any more; may return earlier. */
static inline void sleep_while(_Atomic uint32_t *number, uint32_t seen) {
    syscall(SYS_futex, number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

/* Wakes who sleeps on the number, which has changed. */
static inline void wake_all(_Atomic uint32_t *number) {
    syscall(SYS_futex, number, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* In a forked process, which has none of the sleepers. */
static inline void forget_sleepers(void) {}

#else

#include <pthread.h>

/* One lock and one condition for every number: there is one team. */
static pthread_mutex_t waiting_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t waiting_changed = PTHREAD_COND_INITIALIZER;

static inline void sleep_while(_Atomic uint32_t *number, uint32_t seen) {
    pthread_mutex_lock(&waiting_lock);
    while (atomic_load(number) == seen) pthread_cond_wait(&waiting_changed, &waiting_lock);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void wake_all(_Atomic uint32_t *number) {
    (void)number;
    pthread_mutex_lock(&waiting_lock); /* or a sleeper could have read the number and not wait yet */
    pthread_cond_broadcast(&waiting_changed);
    pthread_mutex_unlock(&waiting_lock);
}

static inline void forget_sleepers(void) {
    pthread_mutex_init(&waiting_lock, NULL);
    pthread_cond_init(&waiting_changed, NULL);
}

#endif

#endif
