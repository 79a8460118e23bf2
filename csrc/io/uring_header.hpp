// The kernel's own header of io_uring, where the system that builds has one that knows plain reads and writes (5.6).
#pragma once
#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)
#define ZEROEXP_URING
#endif
#endif
#endif
