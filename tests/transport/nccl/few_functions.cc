// A libnccl.so.2 that has some of NCCL's functions only, for library_test.cc. CMake sets its
// version. Without nccl.h, whose declarations say the same in NCCL's types.
extern "C" {

int ncclGetVersion(int* version) {
  *version = WEFT_TEST_NCCL_VERSION;
  return 0;
}
const char* ncclGetErrorString(int) { return "no error"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(void*) { return 0; }

}  // extern "C"
