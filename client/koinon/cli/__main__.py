from koinon.cli import main

main()
