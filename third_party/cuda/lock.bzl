"""Locked wheels. Written by tools/lock_wheels.py; do not edit."""

CUDA_WHEELS = {
    "nvidia_cuda_cccl": {
        "dist": "nvidia-cuda-cccl",
        "version": "13.0.85",
        "hashes": [
            "e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649",
        ],
    },
    "nvidia_cuda_crt": {
        "dist": "nvidia-cuda-crt",
        "version": "13.0.88",
        "hashes": [
            "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        ],
    },
    "nvidia_cuda_nvcc": {
        "dist": "nvidia-cuda-nvcc",
        "version": "13.0.88",
        "hashes": [
            "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        ],
        "requires": [
            "nvidia_cuda_crt",
            "nvidia_cuda_runtime",
            "nvidia_nvvm",
        ],
    },
    "nvidia_cuda_runtime": {
        "dist": "nvidia-cuda-runtime",
        "version": "13.0.96",
        "hashes": [
            "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        ],
    },
    "nvidia_nvshmem_cu13": {
        "dist": "nvidia-nvshmem-cu13",
        "version": "3.4.5",
        "hashes": [
            "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
        ],
    },
    "nvidia_nvvm": {
        "dist": "nvidia-nvvm",
        "version": "13.0.88",
        "hashes": [
            "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        ],
    },
}
