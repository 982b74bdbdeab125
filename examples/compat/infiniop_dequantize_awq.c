#include "infiniop_dequantize_awq.h"

#include <nibble/nibble.h>
#include <stdlib.h>

struct InfiniopDequantizeAWQDescriptor {
  infiniDevice_t device;
  int64_t n, k, groups;
};

static infiniStatus_t status_of(nib_status status) {
  switch (status) {
    case NIB_OK: return INFINI_STATUS_SUCCESS;
    case NIB_INVALID_ARGUMENT: return INFINI_STATUS_BAD_PARAM;
    case NIB_UNSUPPORTED: return INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED;
    default: return INFINI_STATUS_INTERNAL_ERROR;
  }
}

static infiniStatus_t check(infiniopTensorDescriptor_t t, infiniDtype_t dtype, size_t rows, size_t columns) {
  if (t->dtype != dtype) return INFINI_STATUS_BAD_TENSOR_DTYPE;
  if (t->ndim != 2 || t->shape[0] != rows || t->shape[1] != columns) return INFINI_STATUS_BAD_TENSOR_SHAPE;
  const int dense = t->strides[1] == 1 && t->strides[0] == (ptrdiff_t)columns;
  return dense ? INFINI_STATUS_SUCCESS : INFINI_STATUS_BAD_TENSOR_STRIDES;
}

infiniStatus_t infiniopCreateDequantizeAWQDescriptor(infiniopHandle_t handle, infiniopDequantizeAWQDescriptor_t* descriptor,
                                                     infiniopTensorDescriptor_t out, infiniopTensorDescriptor_t qweight,
                                                     infiniopTensorDescriptor_t scales, infiniopTensorDescriptor_t zeros) {
  if (!handle || !descriptor || !out || !qweight || !scales || !zeros) return INFINI_STATUS_NULL_POINTER;
  if (handle->device != INFINI_DEVICE_CPU && handle->device != INFINI_DEVICE_NVIDIA)
    return INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED;
  const size_t k = out->shape[0], n = out->shape[1], groups = scales->shape[0];
  if (n % 8 != 0 || groups == 0 || k % groups != 0 || n == 0 || k == 0) return INFINI_STATUS_BAD_TENSOR_SHAPE;
  infiniStatus_t status = check(out, INFINI_DTYPE_F16, k, n);
  if (status == INFINI_STATUS_SUCCESS) status = check(qweight, INFINI_DTYPE_I32, k, n / 8);
  if (status == INFINI_STATUS_SUCCESS) status = check(scales, INFINI_DTYPE_F16, groups, n);
  if (status == INFINI_STATUS_SUCCESS) status = check(zeros, INFINI_DTYPE_I32, groups, n / 8);
  if (status != INFINI_STATUS_SUCCESS) return status;
  infiniopDequantizeAWQDescriptor_t made = malloc(sizeof *made);
  if (!made) return INFINI_STATUS_INTERNAL_ERROR;
  made->device = handle->device;
  made->n = (int64_t)n, made->k = (int64_t)k, made->groups = (int64_t)groups;
  *descriptor = made;
  return INFINI_STATUS_SUCCESS;
}

infiniStatus_t infiniopGetDequantizeAWQWorkspaceSize(infiniopDequantizeAWQDescriptor_t descriptor, size_t* size) {
  if (!descriptor || !size) return INFINI_STATUS_NULL_POINTER;
  *size = 0;
  return INFINI_STATUS_SUCCESS;
}

/* The tensors as a module, packed, and unpacked by the fastest kernel of this CPU. */
static nib_status on_cpu(const nib_named_view tensors[3], const nib_view* out) {
  nib_qtensor* q = NULL;
  nib_weight* weight = NULL;
  nib_plan* plan = NULL;
  const nib_dequantize_desc desc = {.struct_size = sizeof desc, .out = NIB_F16, .transposed = 1};
  const nib_operands operands = {.struct_size = sizeof operands, .d = out};
  size_t bytes = 0;
  nib_status status = nib_read_module(tensors, 3, NULL, &q, NULL);
  if (status == NIB_OK) status = nib_pack(q, NULL, &weight);
  if (status == NIB_OK) status = nib_plan_dequantize(weight, &desc, NULL, &plan);
  if (status == NIB_OK) status = nib_plan_workspace_size(plan, &bytes);
  void* workspace = malloc(bytes + 1);
  if (status == NIB_OK) status = workspace ? nib_plan_run(plan, weight, &operands, workspace, bytes, NULL) : NIB_IO_ERROR;
  free(workspace);
  nib_plan_destroy(plan);
  nib_weight_destroy(weight);
  nib_qtensor_destroy(q);
  return status;
}

infiniStatus_t infiniopDequantizeAWQ(infiniopDequantizeAWQDescriptor_t descriptor, void* workspace, size_t workspace_size,
                                     void* out, const void* qweight, const void* scales, const void* zeros, void* stream) {
  (void)workspace, (void)workspace_size; /* none is needed */
  if (!descriptor || !out || !qweight || !scales || !zeros) return INFINI_STATUS_NULL_POINTER;
  const int64_t n = descriptor->n, k = descriptor->k, groups = descriptor->groups;
  const nib_view to = nib_matrix(out, NIB_F16, k, n);
  if (descriptor->device == INFINI_DEVICE_CPU) {
    const nib_named_view tensors[3] = {{"qweight", nib_matrix(qweight, NIB_S32, k, n / 8)},
                                       {"scales", nib_matrix(scales, NIB_F16, groups, n)},
                                       {"qzeros", nib_matrix(zeros, NIB_S32, groups, n / 8)}};
    return status_of(on_cpu(tensors, &to));
  }
  const nib_checkpoint_tensors tensors = {.struct_size = sizeof tensors,
                                          .qweight = qweight,
                                          .qzeros = zeros,
                                          .scales = scales,
                                          .n = n,
                                          .k = k,
                                          .group = k / groups,
                                          .packing = NIB_AWQ,
                                          .bits = 4,
                                          .scale = NIB_F16};
  return status_of(nib_dequantize_checkpoint_tensors(&tensors, &to, 1, stream));
}

infiniStatus_t infiniopDestroyDequantizeAWQDescriptor(infiniopDequantizeAWQDescriptor_t descriptor) {
  free(descriptor);
  return INFINI_STATUS_SUCCESS;
}
