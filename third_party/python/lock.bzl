"""Locked wheels. Written by tools/lock_wheels.py; do not edit."""

WHEELS = {
    "absl_py": {
        "dist": "absl-py",
        "version": "2.5.1",
        "hashes": [
            "721200f2f0e9960f2ca9dc3a2a706b201f5f75d812c158f059cbbe29eeafbdb8",
        ],
    },
    "ast_serialize": {
        "dist": "ast-serialize",
        "version": "0.13.1",
        "hashes": [
            "9f99786e0d62082a5b121b3437f3167562133711df22128de1e9886f57f0b226",
        ],
    },
    "filelock": {
        "dist": "filelock",
        "version": "4.3.1",
        "hashes": [
            "79e43df8e9fe509cd83a3899a7c186c8077cbbe4d200a1ed3705c2f3bb6bc487",
        ],
    },
    "fsspec": {
        "dist": "fsspec",
        "version": "2026.9.0",
        "hashes": [
            "8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f",
        ],
    },
    "hypothesis": {
        "dist": "hypothesis",
        "version": "6.170.17",
        "hashes": [
            "475bd1ed6971a237540f68a5b2004a415b738a6c7a68bdc3efaa85f8e385d942",
            "ba5757621056597fd71d101357fed17b7f200592ca6050b59bf6733869de9fc5",
            "fd5f7feb13c275bb4672c5ef651ab6df1cb4a054c54d14aa44e578274241587a",
        ],
        "requires": [
            "sortedcontainers",
        ],
    },
    "iniconfig": {
        "dist": "iniconfig",
        "version": "2.3.1",
        "hashes": [
            "9121e2c1fdb355232495be3194c8dfe87ccc2d5dee45947b78e68f499790d7a7",
        ],
    },
    "jinja2": {
        "dist": "jinja2",
        "version": "3.1.6",
        "hashes": [
            "85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67",
        ],
        "requires": [
            "markupsafe",
        ],
    },
    "librt": {
        "dist": "librt",
        "version": "0.17.0",
        "hashes": [
            "598c5455f07fc182a926b88e63776c49dc4cf47465c998cbc6ba1f010b875b51",
            "afa8a6a1916f155e6f35c48d6cb547849af79e07060e36b6aaec1d1c63dc3c7e",
            "e3dad4792d84979f5f1aaa46d22cd062b15f4551bcadc7d2b695d42aac971bf5",
        ],
        "requires": [
            "mypy_extensions",
        ],
    },
    "markupsafe": {
        "dist": "markupsafe",
        "version": "3.0.4",
        "hashes": [
            "434139499bb20b502ed3baa1f169e618f924a97e7a777fea1a49446d80106cf6",
            "6da83a088f8ef93b2d483a8232a4dbf4d69d3d8496b568a03c56becac43e1808",
            "8e124f974786f831d6043728e38296969d3579db8896fe004682f5758e613581",
        ],
    },
    "mpmath": {
        "dist": "mpmath",
        "version": "1.3.0",
        "hashes": [
            "a0b2b9fe80bbcd81a6647ff13108738cfb482d481d826cc0e02f5b35e5c88d2c",
        ],
    },
    "mypy": {
        "dist": "mypy",
        "version": "2.4.1",
        "hashes": [
            "1fb70621535c22fd4b1a0450d37ed1d6c5eb39656a1cebfb189084c12de54ba7",
            "a20ff6cd2af7a670c64f089bfa5fbcebe8ff3bf896c5e6ac7c9862c7960e4494",
            "b69a15fc2e75858d6b15e91ed3a0dcff1a533265183b64734138791fe0f49aa5",
        ],
        "requires": [
            "ast_serialize",
            "librt",
            "mypy_extensions",
            "pathspec",
            "typing_extensions",
        ],
    },
    "mypy_extensions": {
        "dist": "mypy-extensions",
        "version": "1.2.0",
        "hashes": [
            "993e7a20aa5671eb41a7132cf555af30062da99729601601b9a8382b11cae768",
        ],
    },
    "networkx": {
        "dist": "networkx",
        "version": "3.6.1",
        "hashes": [
            "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        ],
    },
    "numpy": {
        "dist": "numpy",
        "version": "2.4.6",
        "hashes": [
            "89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93",
            "90f9849678c75fe7afa2d348ac842c168b0a4d3d61919687216dfc547976d853",
            "a7830bab239b79cda9c08c2da014761cafb48da6150e1da17ac06283f43b6089",
        ],
    },
    "packaging": {
        "dist": "packaging",
        "version": "26.4",
        "hashes": [
            "81383611a09c1bc0b08b76e0fd5829d7c6824c65b27a6aee339da133f4233ea2",
        ],
    },
    "pathspec": {
        "dist": "pathspec",
        "version": "1.1.1",
        "hashes": [
            "a00ce642f577bf7f473932318056212bc4f8bfdf53128c78bbd5af0b9b20b189",
        ],
    },
    "pluggy": {
        "dist": "pluggy",
        "version": "1.7.0",
        "hashes": [
            "7dd7b0d8832ba3cb632c306926ded123429211b83641b35dc5c41ad2d34f9bec",
        ],
    },
    "pybind11": {
        "dist": "pybind11",
        "version": "3.1.0",
        "hashes": [
            "b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0",
        ],
    },
    "pygments": {
        "dist": "pygments",
        "version": "2.21.0",
        "hashes": [
            "2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9",
        ],
    },
    "pytest": {
        "dist": "pytest",
        "version": "9.2.0",
        "hashes": [
            "07acdcf88ec174f907dc01af70bf52d49b014bbab03faeeade31c96b18c2e588",
        ],
        "requires": [
            "iniconfig",
            "packaging",
            "pluggy",
            "pygments",
        ],
    },
    "ruff": {
        "dist": "ruff",
        "version": "0.17.6",
        "hashes": [
            "aa3b08254a732acba246891089a152c47c5733dc36b8ecb76ce8602f8326e5e4",
        ],
    },
    "sortedcontainers": {
        "dist": "sortedcontainers",
        "version": "2.4.0",
        "hashes": [
            "a163dcaede0f1c021485e957a39245190e74249897e2ae4b2aa38595db237ee0",
        ],
    },
    "sympy": {
        "dist": "sympy",
        "version": "1.14.0",
        "hashes": [
            "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
        ],
        "requires": [
            "mpmath",
        ],
    },
    "torch": {
        "dist": "torch",
        "version": "2.13.0",
        "hashes": [
            "60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7",
            "796633c4cdf0fe2cdced72d8f88f22e73dbcfce83132763162f6d4bff13b820b",
            "a3a9a21312872af8a26950b2c15680335a386a1f56ed03e780653d78b9607e9e",
        ],
        "local_hashes": [
            "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        ],
        "requires": [
            "filelock",
            "fsspec",
            "jinja2",
            "networkx",
            "sympy",
            "typing_extensions",
        ],
        "bundle": [
            "nvidia-cublas==13.1.1.3 --hash=sha256:37936a16db8fe4ac1f065c2139360608a543a09275cb1a1af612e08cfa065436",
            "nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
            "nvidia-cuda-nvrtc==13.0.88 --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
            "nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
            "nvidia-cudnn-cu13==9.20.0.48 --hash=sha256:0c45dd8eeb50b603f07995b1b300c62ffe6a1980482b82b3bcf94a4ca9d49304",
            "nvidia-cufft==12.0.0.61 --hash=sha256:6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3",
            "nvidia-cufile==1.15.1.6 --hash=sha256:08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44",
            "nvidia-curand==10.4.0.35 --hash=sha256:1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc",
            "nvidia-cusolver==12.0.4.66 --hash=sha256:0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112",
            "nvidia-cusparse==12.6.3.3 --hash=sha256:2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b",
            "nvidia-cusparselt-cu13==0.8.1 --hash=sha256:786ce87568c303fadb5afcc7102d454cd3040d75f6f8626f5db460d1871f4dd0",
            "nvidia-nccl-cu13==2.29.7 --hash=sha256:edd81538446786ec3b73972543e53bb43bcaf0bfc8ef76cb679fcc390ffe136d",
            "nvidia-nvjitlink==13.5.37 --hash=sha256:280d7cb9649704145f074b8dbde500de04ce02d0872e066e20a83c17bcaa93eb",
            "nvidia-nvshmem-cu13==3.4.5 --hash=sha256:290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
            "nvidia-nvtx==13.0.85 --hash=sha256:4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4",
        ],
    },
    "tqdm": {
        "dist": "tqdm",
        "version": "4.70.1",
        "hashes": [
            "c293e525e6fef9c20e8728fd4612df02a0aa31bb5fe91ecd93e123b1b7bffa73",
        ],
    },
    "typing_extensions": {
        "dist": "typing-extensions",
        "version": "4.16.0",
        "hashes": [
            "481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8",
        ],
    },
}
