// Code for instructions that not every processor has: what marks a function that is compiled for
// them. Which ones this processor has: best_instructions (convert.h). Not part of what kernels.h
// offers.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define KVLEAF_HAS_AVX2 1
#define KVLEAF_AVX2 __attribute__((target("avx2")))
#else
#define KVLEAF_HAS_AVX2 0
#endif
#if KVLEAF_HAS_AVX2
#define KVLEAF_HAS_AVX512 1
#if defined(__clang__)
#define KVLEAF_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define KVLEAF_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define KVLEAF_HAS_AVX512 0
#endif
