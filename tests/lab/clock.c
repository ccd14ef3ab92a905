/* Another wall clock for a process that is started with this in LD_PRELOAD: the file that CLOCK
   names holds the seconds, as int64, by which it differs. Other clocks stay as they are. Waits for
   a date of this clock end then; one that lasts while the clock changes does not notice. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

#define LEAST_DATE 1000000000 /* in seconds: the monotonic clock shows less */

typedef int (*wait_type)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

static const volatile int64_t *shift;
static int (*real)(clockid_t, struct timespec *);
static wait_type real_wait;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *memory = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED)
        shift = memory;
    real_wait = (wait_type)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!real)
        begin();
    int failed = real(clock, now);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *shift;
    return failed;
}

int pthread_cond_timedwait(pthread_cond_t *changed, pthread_mutex_t *lock,
                           const struct timespec *until)
{
    if (!real)
        begin();
    struct timespec there = *until;
    if (shift && there.tv_sec > LEAST_DATE)
        there.tv_sec -= *shift;
    return real_wait(changed, lock, &there);
}

time_t time(time_t *into)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec read;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &read);
    now->tv_sec = read.tv_sec;
    now->tv_usec = read.tv_nsec / 1000;
    return 0;
}
