/* An AWQ dequantize operator with the names and the four calls of InfiniOp's descriptor API, over nibble's C interface. A project that
 * has InfiniOp's headers includes those in place of this one; what is declared here is as much of them as the operator needs.
 *
 *   handle → create a descriptor from tensor descriptors → workspace size → calculate on a stream, often → destroy
 */
#ifndef NIBBLE_EXAMPLES_INFINIOP_DEQUANTIZE_AWQ_H
#define NIBBLE_EXAMPLES_INFINIOP_DEQUANTIZE_AWQ_H

#include <stddef.h>

typedef enum {
  INFINI_STATUS_SUCCESS = 0,
  INFINI_STATUS_INTERNAL_ERROR = 1,
  INFINI_STATUS_BAD_PARAM = 3,
  INFINI_STATUS_NULL_POINTER = 4,
  INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED = 5,
  INFINI_STATUS_BAD_TENSOR_DTYPE = 10,
  INFINI_STATUS_BAD_TENSOR_SHAPE = 11,
  INFINI_STATUS_BAD_TENSOR_STRIDES = 12
} infiniStatus_t;

typedef enum { INFINI_DTYPE_I32 = 5, INFINI_DTYPE_F16 = 12 } infiniDtype_t;
typedef enum { INFINI_DEVICE_CPU = 0, INFINI_DEVICE_NVIDIA = 1 } infiniDevice_t;

struct InfiniopHandle {
  infiniDevice_t device;
};
typedef struct InfiniopHandle* infiniopHandle_t;

struct InfiniopTensorDescriptor {
  infiniDtype_t dtype;
  size_t ndim;
  size_t shape[2];
  ptrdiff_t strides[2]; /* in elements */
};
typedef const struct InfiniopTensorDescriptor* infiniopTensorDescriptor_t;

typedef struct InfiniopDequantizeAWQDescriptor* infiniopDequantizeAWQDescriptor_t;

/* out f16 [K,N], qweight i32 [K,N/8] and zeros i32 [G,N/8] in AWQ's nibble order, scales f16 [G,N]; K is a multiple of G; dense. */
infiniStatus_t infiniopCreateDequantizeAWQDescriptor(infiniopHandle_t handle, infiniopDequantizeAWQDescriptor_t* descriptor,
                                                     infiniopTensorDescriptor_t out, infiniopTensorDescriptor_t qweight,
                                                     infiniopTensorDescriptor_t scales, infiniopTensorDescriptor_t zeros);
infiniStatus_t infiniopGetDequantizeAWQWorkspaceSize(infiniopDequantizeAWQDescriptor_t descriptor, size_t* size);
/* On NVIDIA all pointers are device memory, and the work is enqueued on the stream. The CPU takes its memory itself. */
infiniStatus_t infiniopDequantizeAWQ(infiniopDequantizeAWQDescriptor_t descriptor, void* workspace, size_t workspace_size,
                                     void* out, const void* qweight, const void* scales, const void* zeros, void* stream);
infiniStatus_t infiniopDestroyDequantizeAWQDescriptor(infiniopDequantizeAWQDescriptor_t descriptor);

#endif
