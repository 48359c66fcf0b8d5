// The last error of this library on this thread, in words. Used by the entry functions of every
// unit.
#ifndef KERNELS_HOST_STATUS_H_
#define KERNELS_HOST_STATUS_H_

#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "kernels/abi/deepep_kernel.h"

namespace deepep {

inline thread_local char last_error[512] = "";

// Records why a call is refused: what, value, rule.
__attribute__((format(printf, 2, 3))) inline int32_t refuse(int32_t status, const char* format,
                                                            ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(last_error, sizeof(last_error), format, values);
  va_end(values);
  return status;
}

}  // namespace deepep

#endif  // KERNELS_HOST_STATUS_H_
