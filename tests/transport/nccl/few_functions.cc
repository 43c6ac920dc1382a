// SPDX-License-Identifier: Apache-2.0
// A libnccl.so.2 with only a few of NCCL's functions, for library_test.cc. CMake sets its version.
// It does not include nccl.h, which declares the same functions with NCCL's types.
extern "C" {

int ncclGetVersion(int* version) {
  *version = WEFT_TEST_NCCL_VERSION;
  return 0;
}
const char* ncclGetErrorString(int) { return "no error"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(void*) { return 0; }

}  // extern "C"
