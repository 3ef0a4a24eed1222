// LD_PRELOAD: lets one call of one system function fail, when told to, as a machine does that is short of something.
//
//   fail_call("fallocate", 1, ENOSPC)   the next call of fallocate returns -1 and ENOSPC; 2: the one after it
//   failed_calls()                      how many have failed since
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static char wanted[64];
static atomic_int countdown, failures;
static int wanted_errno;

void fail_call(const char* name, int nth, int error) {
  atomic_store(&countdown, 0);
  strncpy(wanted, name, sizeof(wanted) - 1);
  wanted_errno = error;
  atomic_store(&failures, 0);
  atomic_store(&countdown, nth);
}

int failed_calls(void) { return atomic_load(&failures); }

static int fails(const char* name) {
  if (atomic_load(&countdown) <= 0 || strcmp(name, wanted) != 0) return 0;
  if (atomic_fetch_sub(&countdown, 1) != 1) return 0;
  atomic_fetch_add(&failures, 1);
  errno = wanted_errno;
  return 1;
}

#define WRAP(result, name, parameters, ...)                                     \
  result name parameters {                                                      \
    static result(*real) parameters;                                            \
    if (real == NULL) real = (result(*) parameters)dlsym(RTLD_NEXT, #name);     \
    return fails(#name) ? (result)-1 : real(__VA_ARGS__);                       \
  }

WRAP(int, memfd_create, (const char* name, unsigned flags), name, flags)
WRAP(int, fallocate, (int fd, int mode, off_t offset, off_t length), fd, mode, offset, length)
WRAP(int, ftruncate, (int fd, off_t length), fd, length)
WRAP(int, socket, (int domain, int type, int protocol), domain, type, protocol)
WRAP(int, bind, (int fd, const struct sockaddr* address, socklen_t length), fd, address, length)
WRAP(int, listen, (int fd, int backlog), fd, backlog)
WRAP(int, connect, (int fd, const struct sockaddr* address, socklen_t length), fd, address, length)
WRAP(int, accept4, (int fd, struct sockaddr* address, socklen_t* length, int flags), fd, address, length, flags)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr* message, int flags), fd, message, flags)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr* message, int flags), fd, message, flags)
WRAP(int, getsockopt, (int fd, int level, int name, void* value, socklen_t* length), fd, level, name, value, length)

// Files only: the program's own memory is not what is tested.
void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  static void* (*real)(void*, size_t, int, int, int, off_t);
  if (real == NULL) real = (void* (*)(void*, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
  if (fd >= 0 && fails("mmap")) return MAP_FAILED;
  return real(address, length, protection, flags, fd, offset);
}

int fcntl(int fd, int command, ...) {
  static int (*real)(int, int, ...);
  if (real == NULL) real = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64");
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  return fails("fcntl") ? -1 : real(fd, command, argument);
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (real == NULL) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  va_list list;
  va_start(list, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_pidfd_open && fails("pidfd_open")) return -1;
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  static int (*real)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (real == NULL) {
    real = (int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*))dlsym(RTLD_NEXT, "pthread_create");
  }
  return fails("pthread_create") ? wanted_errno : real(thread, attributes, start, argument);
}
