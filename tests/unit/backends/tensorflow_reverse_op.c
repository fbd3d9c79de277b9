/* An operation for TensorFlow, reversing a vector, through its C interface. Prototypes are written out so that no header is needed. */
#include <stdint.h>
void *TF_NewStatus(void), *TF_TensorData(void*), *TF_NewOpDefinitionBuilder(const char*);
void *TF_AllocateOutput(void*, int, int, const int64_t*, int, unsigned long, void*);
void *TF_NewKernelBuilder(const char*, const char*, void* (*)(void*), void (*)(void*, void*), void (*)(void*));
int64_t TF_TensorElementCount(void*);
void TF_DeleteStatus(void*), TF_DeleteTensor(void*), TF_GetInput(void*, int, void**, void*);
void TF_OpDefinitionBuilderAddInput(void*, const char*), TF_OpDefinitionBuilderAddOutput(void*, const char*);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(void*, void (*)(void*, void*));
void TF_ShapeInferenceContextSetUnknownShape(void*, void*), TF_RegisterOpDefinition(void*, void*);
void TF_RegisterKernelBuilder(const char*, void*, void*);
static void shape(void* c, void* s) { TF_ShapeInferenceContextSetUnknownShape(c, s); }
static void* create(void* c) { return 0; }
static void compute(void* k, void* c) {
  void* s = TF_NewStatus();
  void* x = 0;
  TF_GetInput(c, 0, &x, s);
  int64_t n = TF_TensorElementCount(x), dims[1] = {n};
  void* y = TF_AllocateOutput(c, 0, 1, dims, 1, n * 4, s);
  for (int64_t i = 0; i < n; i++) ((float*)TF_TensorData(y))[i] = ((float*)TF_TensorData(x))[n - 1 - i];
  TF_DeleteTensor(x); TF_DeleteTensor(y); TF_DeleteStatus(s);
}
static void delete_kernel(void* k) {}
__attribute__((constructor)) static void init(void) {
  void* s = TF_NewStatus();
  void* b = TF_NewOpDefinitionBuilder("NaiadReverse");
  TF_OpDefinitionBuilderAddInput(b, "x: float"); TF_OpDefinitionBuilderAddOutput(b, "y: float");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(b, shape);
  TF_RegisterOpDefinition(b, s);
  TF_RegisterKernelBuilder("NaiadReverse", TF_NewKernelBuilder("NaiadReverse", "CPU", create, compute, delete_kernel), s);
  TF_DeleteStatus(s);
}
